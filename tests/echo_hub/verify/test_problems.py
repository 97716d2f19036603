from __future__ import annotations

import numpy as np
import pytest

from echo_hub.base_model import PromptCodec, resolve_base
from echo_hub.config import HubConfig, RunConfig, TaskConfig
from echo_hub.verify.problems import Problems, accuracy
from echo_shared.errors import ConfigError


@pytest.fixture(scope="module")
def codec() -> PromptCodec:
    return PromptCodec.load(resolve_base("builtin:tiny"))


def problems(codec: PromptCodec, *, seed: int = 0, heldout: int = 4, num_heldout: int | None = None) -> Problems:
    config = HubConfig(run=RunConfig(seed=seed), task=TaskConfig(heldout_problems=heldout))
    return Problems.of_run(config, codec, num_heldout=num_heldout)


def answer(codec: PromptCodec, prompt_ids: np.ndarray) -> np.ndarray:
    """The right completion of an addition, as the tiny base's own tokens."""
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
    assert [ids.tolist() for ids in one.heldout_prompts()] == [ids.tolist() for ids in other.heldout_prompts()]


def test_the_reward_is_the_tasks(codec: PromptCodec) -> None:
    mine = problems(codec)
    right = answer(codec, mine.prompt_ids(3))
    stopped = np.append(right, codec.stop_ids[0]).astype(np.int32)
    assert [mine.reward(3, ids) for ids in (right, stopped, right[:-1], mine.prompt_ids(3))] == [1.0, 1.0, 0.0, 0.0]
    assert mine.reward(4, right) == 0.0, "another group's answer"


def test_held_out_problems_are_scored_in_order(codec: PromptCodec) -> None:
    mine = problems(codec)
    completions = [answer(codec, ids) for ids in mine.heldout_prompts()]
    assert mine.heldout_rewards(completions) == [1.0] * 4
    assert mine.heldout_rewards(completions[:1] + completions[:0:-1]) == [1.0, 0.0, 1.0, 0.0]
    assert len(problems(codec, num_heldout=7).heldout_prompts()) == 7


def test_accuracy_counts_what_is_solved() -> None:
    assert accuracy([1.0, 0.99, 0.0, 1.0 - 1e-9]) == 0.5


def test_a_task_that_does_not_exist(codec: PromptCodec) -> None:
    with pytest.raises(ConfigError, match="nonesuch"):
        Problems.of_run(HubConfig(task=TaskConfig(name="reasoning-gym:nonesuch")), codec)
