from __future__ import annotations

import pytest

from benchmarks.demo import hand_off_s, utilisation, utilisation_when_ready, waited_s


def test_utilisation_is_the_share_of_the_time_in_which_a_step_trains() -> None:
    steps = [{"train_s": 2.0}, {"train_s": 3.0, "gap_s": 1.0}, {"train_s": 4.0, "gap_s": 2.0}]
    assert utilisation(steps) == 9 / 12
    with pytest.raises(KeyError, match="gap_s"):
        utilisation([*steps, {"train_s": 1.0}])


def test_while_no_batch_is_there_the_learner_is_not_held_up() -> None:
    """Planned half a second before the learner is free, which takes it up a quarter of one later; then planned a second
    after it, and begun half a second later."""
    steps = [
        {"train_s": 9.0, "planned_s": -9.0, "at_s": 0.0},
        {"train_s": 2.0, "planned_s": -0.5, "at_s": 2.25, "gap_s": 0.25, "eval_s": 0.0},
        {"train_s": 2.0, "planned_s": 3.25, "at_s": 5.75, "gap_s": 1.5, "eval_s": 0.0},
    ]
    assert list(map(waited_s, steps, steps[1:])) == [0.0, 1.0]
    assert list(map(hand_off_s, steps, steps[1:])) == [0.25, 0.5]
    assert utilisation_when_ready(steps) == pytest.approx(4.0 / 4.75)


def test_what_it_evaluates_between_two_steps_is_no_hand_off() -> None:
    """Of a step that was planned before the learner was free; else the evaluation may have been in the waiting time."""
    before = {"train_s": 1.0, "planned_s": -1.0, "at_s": 0.0}
    step = {"train_s": 1.0, "planned_s": -0.5, "at_s": 3.0, "gap_s": 0.75, "eval_s": 0.5}
    assert hand_off_s(before, step) == 0.25
    assert hand_off_s(before, {**step, "planned_s": 0.5}) == 0.25
    assert hand_off_s(before, {**step, "planned_s": 0.25}) == 0.5
