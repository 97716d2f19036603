from __future__ import annotations

import numpy as np
import pytest

from echo_hub.config.training_sections import TrainingConfig
from echo_hub.learner.schedule import share_of_highest
from echo_hub.learner.sft_plan import SftPlan, SftSettings, make_plan
from echo_hub.run.demonstrations import Demonstration
from echo_shared.errors import LearnerError


def demonstration(prompt: int, completion: int, length: int = 3) -> Demonstration:
    return Demonstration(
        prompt_ids=np.full(2, prompt, np.int32),
        completion_ids=np.full(length, completion, np.int32),
        loss_mask=np.ones(length, bool),
    )


MANY = [demonstration(number // 2, number) for number in range(40)]
"""Forty demonstrations, in pairs that share a prompt."""


def numbers(plan: SftPlan, epoch: int) -> list[int]:
    begin = (0, *plan.epoch_ends)[epoch]
    return [int(one.completion_ids[0]) for batch in plan.batches[begin : plan.epoch_ends[epoch]] for one in batch]


def test_every_epoch_trains_each_example_once_in_its_own_order() -> None:
    plan = make_plan(MANY, SftSettings(epochs=2, heldout=0.1, batch_tokens=15, seed=1))
    held = {int(one.completion_ids[0]) for one in plan.heldout}
    first, second = numbers(plan, 0), numbers(plan, 1)
    assert sorted(first) == sorted(second) == sorted({*range(40)} - held)
    assert first != second
    assert [len(batch) for batch in plan.batches] == [3] * 24, "each has 5 tokens with its prompt"
    assert plan.epoch_ends == (12, 24)


def test_whole_prompts_are_held_out_and_the_same_ones_when_others_are_added() -> None:
    plan = make_plan(MANY, SftSettings(heldout=0.1, seed=1))
    held = [int(one.prompt_ids[0]) for one in plan.heldout]
    assert len(held) == 4 and len(set(held)) == 2
    more = make_plan([*MANY, *(demonstration(number, number) for number in range(20, 30))], SftSettings(heldout=0.2))
    assert {int(one.prompt_ids[0]) for one in make_plan(MANY, SftSettings(heldout=0.1)).heldout} <= {
        int(one.prompt_ids[0]) for one in more.heldout
    }


def test_the_plan_depends_only_on_the_seed() -> None:
    def order(seed: int) -> list[int]:
        return numbers(make_plan(MANY, SftSettings(epochs=1, heldout=0, seed=seed)), 0)

    assert order(1) == order(1) != order(2)


def test_nothing_may_be_held_out_but_not_everything() -> None:
    assert make_plan(MANY, SftSettings(heldout=0)).heldout == ()
    with pytest.raises(LearnerError, match="No demonstration is left to train on") as error:
        make_plan(MANY[:2], SftSettings(heldout=0.05))
    assert "--heldout 0" in str(error.value)


def test_the_learning_rate_warms_up_over_a_thirtieth_and_falls_to_nothing() -> None:
    settings = SftSettings(epochs=6, heldout=0, batch_tokens=20, learning_rate=1e-3)
    plan = make_plan(MANY, settings)
    training = plan.training(settings, TrainingConfig(schedule="constant", max_grad_norm=0.5))
    assert (training.steps, training.warmup_steps, training.max_grad_norm) == (60, 2, 0.5)
    shares = [share_of_highest(training, update) for update in range(1, 62)]
    assert shares[:3] == [pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0]
    assert shares[59] == pytest.approx(1 / 58) and shares[60] == 0
