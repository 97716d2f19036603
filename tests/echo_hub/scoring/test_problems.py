from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_hub.config.sections import HubConfig, RunConfig
from echo_hub.config.task_sections import EvaluationConfig, SamplingConfig, TaskConfig
from echo_hub.core.policy.mixture import Mixture
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.task_problems import EnvironmentReply, TaskProblems
from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import Ending, Observation, Response
from echo_hub.tasks.stream import ProblemStream
from echo_shared.errors import ConfigError, ScorerError
from tests.echo_hub.run.test_chat_template import QWEN3, codec_of, tokenizer_of


@pytest.fixture(scope="module")
def codec() -> PromptCodec:
    return PromptCodec.load(resolve_base("builtin:tiny"))


def problems(codec: PromptCodec, *, seed: int = 0, heldout: int = 4) -> Problems:
    config = HubConfig(run=RunConfig(seed=seed), evaluation=EvaluationConfig(problems=heldout))
    return Problems.of_run(config, codec)


def answer(codec: PromptCodec, prompt_ids: np.ndarray) -> np.ndarray:
    """Return the token ids of the right completion for a prompt of the arithmetic task, with the tiny base model."""
    left, _, right = codec.decode(prompt_ids).removesuffix("=").partition("+")
    return codec.encode_prompt(str(int(left) + int(right)))


def test_a_group_is_the_same_after_a_restart(codec: PromptCodec) -> None:
    before, after = problems(codec), problems(codec)
    for group_id in (0, 7, 10**6):
        assert before.prompt_ids(group_id).tolist() == after.prompt_ids(group_id).tolist()
        assert before.seed(group_id) == after.seed(group_id)
    assert len({before.seed(group_id) for group_id in range(1_000)}) == 1_000


def test_another_run_has_other_problems_but_is_judged_by_the_same(codec: PromptCodec) -> None:
    one, other = problems(codec, seed=1), problems(codec, seed=2)
    assert [one.prompt_ids(n).tolist() for n in range(9)] != [other.prompt_ids(n).tolist() for n in range(9)]
    assert one.seed(0) != other.seed(0)
    assert [ids.tolist() for ids in one.heldout_prompt_ids()] == [ids.tolist() for ids in other.heldout_prompt_ids()]


def test_the_reward_is_the_tasks(codec: PromptCodec) -> None:
    mine = problems(codec)
    right = answer(codec, mine.prompt_ids(3))
    stopped = np.append(right, codec.stop_ids[0]).astype(np.int32)
    tried = (right, stopped, right[:-1], mine.prompt_ids(3))
    assert [mine.respond(3, [ids]) for ids in tried] == [1.0, 1.0, 0.0, 0.0]
    assert mine.respond(4, [right]) == 0.0, "the answer belongs to another group"
    assert not mine.multi_turn


def test_held_out_problems_are_scored_in_order(codec: PromptCodec) -> None:
    mine = problems(codec)
    completions = [answer(codec, ids) for ids in mine.heldout_prompt_ids()]
    assert [mine.heldout_respond(number, [ids]) for number, ids in enumerate(completions)] == [1.0] * 4
    assert mine.heldout_respond(1, [completions[3]]) == 0.0
    assert len(problems(codec, heldout=7).heldout_prompt_ids()) == 7


class Count:
    """An environment that answers every turn with `?=`, until the model replies `9`."""

    name = "count"
    reward_bounds = (0.0, 4.0)
    asked = 0

    def __init__(self, reward_if_cut: float = 0.25, turn_reward: float = -4.0) -> None:
        self.reward_if_cut, self.turn_reward = reward_if_cut, turn_reward

    def sample(self, seed: int) -> Problem:
        return Problem(prompt=f"{seed % 1000}=")

    def respond(self, problem: Problem, replies: Sequence[str]) -> Response:
        self.asked += 1
        if replies[-1] == "9":
            return Ending(reward=len(replies))
        return Observation(text="?=", reward_if_cut=self.reward_if_cut, turn_reward=self.turn_reward)


def test_an_environment_answers_until_the_episode_ends(codec: PromptCodec) -> None:
    mine = counting(codec)
    assert mine.multi_turn
    again, nine = codec.encode_prompt("1"), codec.encode_prompt("9")
    answered = mine.respond(3, [again])
    assert isinstance(answered, EnvironmentReply) and codec.decode(answered.observation_ids) == "?="
    assert answered.turn_reward == -4.0
    assert isinstance(said := mine.heldout_respond(0, [again]), np.ndarray) and codec.decode(said) == "?="
    assert mine.respond(3, [again, again, nine]) == 3.0
    assert mine.heldout_respond(0, [again, nine]) == 2.0
    with pytest.raises(ScorerError, match="from 0 to 4"):
        mine.respond(3, [again] * 4 + [nine])


def test_a_conversation_that_has_no_room_for_another_turn_ends(codec: PromptCodec) -> None:
    mine = counting(codec)
    again = codec.encode_prompt("1")
    turn_tokens = len(again) + 2
    most = (codec.context_tokens - 4 - len(mine.prompt_ids(3))) // turn_tokens
    assert isinstance(mine.respond(3, [again] * most, 2 * (most - 1)), EnvironmentReply)
    assert mine.respond(3, [again] * (most + 1), 2 * most) == 0.25
    mine = counting(codec, Count(reward_if_cut=float("nan")))
    with pytest.raises(ScorerError, match="The reward is nan"):
        mine.respond(3, [again] * (most + 1), 2 * most)


@pytest.mark.parametrize("turn_reward", [float("nan"), float("-inf"), 4.1, -5.0, "1", None])
def test_an_invalid_turn_reward_is_the_environments_failure(codec: PromptCodec, turn_reward: Any) -> None:
    mine = counting(codec, Count(turn_reward=turn_reward))
    with pytest.raises(ScorerError, match=r"reward of a turn is .* from -4 to 4"):
        mine.respond(3, [codec.encode_prompt("1")])
    assert mine.respond(3, [codec.encode_prompt("9")]) == 1.0


def test_an_environment_is_called_once_for_any_conversation(codec: PromptCodec) -> None:
    task = Count()
    mine = counting(codec, task)
    mine.respond(3, [codec.encode_prompt("1")] * 8, 14)
    assert task.asked == 1


def counting(codec: PromptCodec, task: Count | None = None) -> Problems:
    task = task or Count()
    stream = ProblemStream(task, run_seed=0, heldout_problems=1)
    one = TaskProblems(task=task, stream=stream, codec=codec, max_tokens=4)
    return Problems({"": one}, mixture=Mixture.of(0, [1.0]), sets=HubConfig().evaluation_sets)


def test_problems_that_leave_no_room_for_a_completion_are_passed_over(codec: PromptCodec, tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    texts = [f"{number}+1=" + "+1" * (number % 2) * codec.context_tokens for number in range(40)]
    path.write_text("\n".join(json.dumps({"prompt": text, "answer": 1}) for text in texts))
    config = HubConfig(
        task=TaskConfig(name="jsonl", options={"path": str(path)}), evaluation=EvaluationConfig(problems=4)
    )
    mine = Problems.of_run(config, codec)
    longest = codec.context_tokens - config.sampling.max_tokens
    assert all(len(ids) <= longest for ids in (*mine.heldout_prompt_ids(), *map(mine.prompt_ids, range(200))))


def test_a_task_of_which_no_problem_fits_is_refused_before_the_run(codec: PromptCodec) -> None:
    config = HubConfig(sampling=SamplingConfig(max_tokens=codec.context_tokens - 2))
    with pytest.raises(ConfigError, match=r"(?s)too long.*sampling\.max_tokens"):
        Problems.of_run(config, codec).prepare()


def test_another_that_is_told_the_held_out_prompts_has_the_same_problems(codec: PromptCodec) -> None:
    config = HubConfig(evaluation=EvaluationConfig(problems=4))
    first = Problems.of_run(config, codec)
    second = Problems.of_run(config, codec, cached=1, held_out=first.held_out)
    right = [answer(codec, ids) for ids in first.heldout_prompt_ids()]
    assert [second.heldout_respond(number, [ids]) for number, ids in enumerate(right)] == [1.0] * 4
    assert [second.prompt_ids(n).tolist() for n in range(9)] == [first.prompt_ids(n).tolist() for n in range(9)]


def test_a_task_that_does_not_exist(codec: PromptCodec) -> None:
    with pytest.raises(ConfigError, match="nonesuch"):
        Problems.of_run(HubConfig(task=TaskConfig(name="reasoning-gym:nonesuch")), codec)


def test_a_tool_answers_in_the_chat_templates_own_form() -> None:
    codec = codec_of(QWEN3, strip_thinking=True)
    config = HubConfig(task=TaskConfig(name="environment:calculator"), evaluation=EvaluationConfig(problems=2))
    mine = Problems.of_run(config, codec)
    prompt = codec.text(mine.prompt_ids(3))
    assert "<tools>" in prompt and '"calculate"' in prompt and mine.codec.num_ids == codec.num_ids
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "2*3"}}</tool_call>'

    def drawn(text: str) -> np.ndarray:
        return np.array([*tokenizer_of(QWEN3).encode(text).ids, *codec.stop_ids], np.int32)

    answered = mine.respond(3, [drawn(f"<think>Hm.</think>{call}")])
    assert isinstance(answered, EnvironmentReply) and answered.turn_reward == 0.0
    assert codec.text(answered.observation_ids) == (
        "\n<|im_start|>user\n<tool_response>\n6\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    bad = mine.respond(3, [drawn("<tool_call>{</tool_call>")])
    assert isinstance(bad, EnvironmentReply) and "Error: The call is not JSON" in codec.text(bad.observation_ids)
    left, right = re.findall(r"\d+", prompt.partition("What is")[2])[:2]
    right_answer = str(int(left) * int(right))
    assert mine.respond(3, [drawn(call), drawn(f"<answer>{right_answer}</answer>")]) == 1.0
    assert mine.respond(3, [drawn(f"<think>{call}</think>{right_answer}")]) == 1.0, (
        "a call inside a thought does not count"
    )
    assert mine.respond(3, [drawn(f"<think><answer>{right_answer}</answer>")]) == 0.0, (
        "nor does an answer in an unclosed thought"
    )


def test_tools_need_a_chat_template(codec: PromptCodec) -> None:
    config = HubConfig(task=TaskConfig(name="environment:calculator"), evaluation=EvaluationConfig(problems=2))
    with pytest.raises(ConfigError, match="has tools"):
        Problems.of_run(config, codec)
