from __future__ import annotations

import pytest

from benchmarks.demo import hand_off_s, utilisation, utilisation_when_ready, waited_s


def test_utilisation_is_the_share_of_the_time_in_which_a_step_trains() -> None:
    steps = [{"train_s": 2.0}, {"train_s": 3.0, "gap_s": 1.0}, {"train_s": 4.0, "gap_s": 2.0}]
    assert utilisation(steps) == 9 / 12
    with pytest.raises(KeyError, match="gap_s"):
        utilisation([*steps, {"train_s": 1.0}])


def test_the_hand_off_does_not_include_the_wait_for_a_batch() -> None:
    """The hand-off is the time from the moment when a step could start (learner free, batch planned) to its start. Here
    the second step starts 0.25 s after the learner was free, and the third 0.5 s after its batch, which came 1 s late.
    """
    steps = [
        {"train_s": 9.0, "planned_s": -9.0, "at_s": 0.0},
        {"train_s": 2.0, "planned_s": -0.5, "at_s": 2.25, "gap_s": 0.25, "eval_s": 0.0},
        {"train_s": 2.0, "planned_s": 3.25, "at_s": 5.75, "gap_s": 1.5, "eval_s": 0.0},
    ]
    assert list(map(waited_s, steps, steps[1:])) == [0.0, 1.0]
    assert list(map(hand_off_s, steps, steps[1:])) == [0.25, 0.5]
    assert utilisation_when_ready(steps) == pytest.approx(4.0 / 4.75)


def test_an_evaluation_between_two_steps_is_no_hand_off() -> None:
    """An evaluation's time is subtracted from the hand-off, unless the learner could evaluate while it waited for its
    batch.
    """
    before = {"train_s": 1.0, "planned_s": -1.0, "at_s": 0.0}
    step = {"train_s": 1.0, "planned_s": -0.5, "at_s": 3.0, "gap_s": 0.75, "eval_s": 0.5}
    assert hand_off_s(before, step) == 0.25
    assert hand_off_s(before, {**step, "planned_s": 0.5}) == 0.25
    assert hand_off_s(before, {**step, "planned_s": 0.25}) == 0.5
