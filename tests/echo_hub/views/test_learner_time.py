from __future__ import annotations

import pytest

from echo_hub.views.learner_time import REASONS, learner_time, usual_hand_off_s
from echo_shared.records.run import StepRecord


def step(number: int, *, planned: float, trained: float, train_s: float, eval_s: float | None = None) -> StepRecord:
    return StepRecord(
        step=number,
        planned_at=planned,
        trained_at=trained,
        num_groups=1,
        num_rollouts=2,
        num_tokens=4,
        mean_reward=0.5,
        staleness_mean=0.0,
        staleness_max=0,
        figures={"seconds": train_s, "eval_s": eval_s},
    )


def test_nothing_is_known_before_the_first_step() -> None:
    assert learner_time([], started_at=0.0) is None
    assert learner_time([step(7, planned=1.0, trained=3.0, train_s=2.0)], started_at=0.0) is None
    assert usual_hand_off_s([]) == 0.0


def test_where_the_time_goes() -> None:
    told = learner_time(
        [
            step(1, planned=4.0, trained=6.0, train_s=1.5),
            step(2, planned=6.0, trained=8.0, train_s=1.5),
            step(3, planned=9.0, trained=12.0, train_s=1.5, eval_s=1.0),
        ],
        started_at=0.0,
        waits_since=("rollouts", 12.0, 16.0),
    )
    assert told is not None
    assert told.window_s == pytest.approx(16.0)
    assert told.training == pytest.approx(4.5 / 16)
    seconds = {reason: share * 16 for reason, share in told.idle.items()}
    expected = {"rollouts": 1.0 + 4.0, "hand_off": 1.5, "evaluation": 1.0, "down": 0.0, "start": 4.0}
    assert seconds == pytest.approx(expected)
    assert told.idle_share == pytest.approx(11.5 / 16)
    assert tuple(told.idle) == REASONS


def test_an_evaluation_while_it_waits_anyway_costs_nothing() -> None:
    told = learner_time(
        [
            step(1, planned=0.0, trained=2.0, train_s=2.0),
            step(2, planned=6.0, trained=8.0, train_s=2.0, eval_s=3.0),
        ],
        started_at=0.0,
    )
    assert told is not None
    assert (told.idle["rollouts"], told.idle["evaluation"]) == (0.5, 0.0)


def test_a_learner_that_was_down_is_not_a_hand_off() -> None:
    """Hand-off (the time from a step's plan to its start) must not include ten seconds in which the learner was
    down.
    """
    steps = [step(k, planned=2.0 * k, trained=2.0 * k + 2, train_s=1.75) for k in range(1, 5)]
    steps.append(step(5, planned=10.0, trained=22.0, train_s=1.75))
    told = learner_time(steps[1:], started_at=0.0)
    assert told is not None
    assert told.window_s == pytest.approx(16.0)
    assert told.idle["down"] * 16 == pytest.approx(10.0)
    assert told.idle["hand_off"] * 16 == pytest.approx(3 * 0.25)


def test_a_step_that_is_planned_while_the_one_before_is_trained_waits_for_nothing() -> None:
    steps = [
        step(7, planned=0.0, trained=10.0, train_s=9.5),
        step(8, planned=3.0, trained=20.0, train_s=9.5),
        step(9, planned=12.0, trained=30.0, train_s=9.5),
    ]
    told = learner_time(steps, started_at=0.0)
    assert told is not None and told.training == pytest.approx(0.95)
    assert told.idle["hand_off"] == pytest.approx(0.05) and told.idle["rollouts"] == 0.0
    assert usual_hand_off_s(steps) == 0.5
