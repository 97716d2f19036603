"""Measures the accuracy of a model on held-out problems of the hub's tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import Ending, Environment, ReplayedEnvironment
from echo_hub.tasks.registry import make_task
from echo_hub.tasks.rewards import RewardBounds
from echo_shared.sampling import torch_sampler
from echo_shared.sampling.interface import GroupRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    accuracy: float
    shortest: int
    mean_tokens: float
    longest: int

    def __str__(self) -> str:
        return f"{self.accuracy:.3f} right, {self.shortest} to {self.longest} tokens, mean {self.mean_tokens:.0f}"


def measure(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    name: str,
    problems: Sequence[Problem],
    *,
    options: dict[str, Any],
    max_tokens: int,
) -> Found:
    """Sample one completion per problem at temperature 1, or a whole episode if the task is an environment."""
    task = make_task(name, options)
    bounds = RewardBounds.of(task)
    prompts = [list(tokenizer.encode(problem.prompt)) for problem in problems]
    replies: list[list[str]] = [[] for _ in problems]
    open_ones = list(range(len(problems)))
    solved, lengths = 0, []
    while open_ones:
        requests = [
            GroupRequest(
                lease_id=number,
                group_id=number,
                indices=(0,),
                prompt_ids=np.array(prompts[number], np.int32),
                seed=1_000 * number + len(replies[number]),
                policy_version=0,
                temperature=1.0,
                max_tokens=max_tokens,
                stop_ids=(tokenizer.eos_token_id,),
            )
            for number in open_ones
        ]
        open_ones = []
        for rollout in torch_sampler.sample_groups(model, requests):
            number = rollout.group_id
            ids = rollout.completion_ids.tolist()
            lengths.append(len(ids))
            replies[number].append(str(tokenizer.decode(ids, skip_special_tokens=True)))
            assert not isinstance(task, Environment), "a task without state"
            if not isinstance(task, ReplayedEnvironment):
                solved += bounds.is_solved(task.score(problems[number], replies[number][0]))
                continue
            response = task.respond(problems[number], replies[number])
            if isinstance(response, Ending):
                solved += bounds.is_solved(response.reward)
            else:
                prompts[number] += [*ids, *tokenizer.encode(response.text)]
                open_ones.append(number)
    return Found(
        accuracy=solved / len(problems),
        shortest=min(lengths),
        mean_tokens=sum(lengths) / len(lengths),
        longest=max(lengths),
    )
