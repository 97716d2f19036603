"""The built-in model `builtin:small` must solve new problems of each task sometimes but not always, so that training
can improve it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from echo_hub.commands.demo_settings import DemoTask, demo_settings
from echo_hub.config.file import load_config
from echo_hub.config.sections import HubConfig
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import Ending, ReplayedEnvironment
from echo_hub.tasks.registry import make_task
from echo_hub.tasks.stream import ProblemStream
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.sampling.torch_sampler import sample_groups

PROBLEMS = 32


class Sampler:
    """Samples completions at temperature 1, for all prompts in one batch."""

    def __init__(self, config: HubConfig) -> None:
        torch.set_num_threads(1)
        base = resolve_base(config.model.base)
        self.codec = PromptCodec.load(base)
        self._model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        self._max_tokens = config.sampling.max_tokens

    def draw(self, prompts: Sequence[NDArray[np.int32]], *, seed: int) -> list[NDArray[np.int32]]:
        requests = [
            GroupRequest(
                lease_id=number,
                group_id=number,
                indices=(0,),
                prompt_ids=prompt_ids,
                seed=1_000 * seed + number,
                policy_version=0,
                temperature=1.0,
                max_tokens=self._max_tokens,
                stop_ids=self.codec.stop_ids,
            )
            for number, prompt_ids in enumerate(prompts)
        ]
        drawn: dict[int, FinishedRollout] = {each.lease_id: each for each in sample_groups(self._model, requests)}
        return [drawn[number].completion_ids for number in range(len(prompts))]


def is_solved(task: ReplayedEnvironment, problem: Problem, sampler: Sampler) -> bool:
    """Play one episode; return True if it ends with reward 1."""
    ids = sampler.codec.encode_prompt(problem.prompt)
    replies: list[str] = []
    while True:
        (drawn,) = sampler.draw([ids], seed=len(replies))
        replies.append(sampler.codec.decode(drawn))
        response = task.respond(problem, replies)
        if isinstance(response, Ending):
            return response.reward == 1
        after = sampler.codec.encode_answer([{"role": "user", "content": response.text}], after=int(drawn[-1]))
        ids = np.concatenate([ids, drawn, after])


def held_out(config: HubConfig, count: int) -> tuple[Any, list[Problem]]:
    task = make_task(config.task.name, config.task.options)
    stream = ProblemStream(task, run_seed=0, heldout_problems=count)
    return task, [stream.heldout(number) for number in range(count)]


@pytest.mark.parametrize("of", [DemoTask.WORKED, DemoTask.KNIGHTS_KNAVES])
def test_the_small_base_reasons_before_it_answers_and_often_errs(of: DemoTask) -> None:
    config = load_config(None, demo_settings(of, {}))
    task, problems = held_out(config, PROBLEMS)
    sampler = Sampler(config)
    drawn = sampler.draw([sampler.codec.encode_prompt(problem.prompt) for problem in problems], seed=0)
    accuracy = np.mean([task.score(p, sampler.codec.decode(ids)) for p, ids in zip(problems, drawn, strict=True)])
    assert 0.25 <= accuracy <= 0.9
    lengths = [len(ids) for ids in drawn]
    assert np.mean([length == config.sampling.max_tokens for length in lengths]) < 0.1
    assert np.mean(lengths) > 30
    if of is DemoTask.WORKED:
        assert max(lengths) > 5 * min(lengths)


def test_the_small_base_solves_some_multi_turn_boards() -> None:
    config = load_config(None, demo_settings(DemoTask.SOKOBAN, {}))
    task, problems = held_out(config, 32)
    sampler = Sampler(config)
    assert 0 < np.mean([is_solved(task, problem, sampler) for problem in problems]) <= 0.5
