"""Split the learner's recent time into training and the reasons for not training.

    trained          planned               taken up        trained
    step k - 1 ──────── step k ──────────────── step k ──────── step k
               rollouts        hand_off, evaluation,    training
               or start        down

A step is planned when its rollouts have arrived, perhaps while the previous step is still training. Until the plan, a
free learner waits for rollouts; before the run's first step, this time is the start of the run. Hand-off is the time
between plan and training in which the learner is free. The learner itself reports the time of evaluations. A hand-off
far above the usual one means that the learner or the hub was down. If a hub is stopped while it waits for rollouts, the
database cannot show this: it looks like waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from echo_shared.records.run import StepRecord
from echo_shared.records.step_figures import EVAL_S, SECONDS

REASONS: Final = ("rollouts", "hand_off", "evaluation", "down", "start")

NOT_A_HAND_OFF_S: Final = 1.0
"""Hand-offs shorter than this many seconds never count as downtime, because a restart of the learner takes longer."""

NOT_USUAL: Final = 5.0
"""A hand-off that takes longer than this multiple of the usual one counts as downtime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerTime:
    """How the learner spent the measured time: shares in 0..1. `training` and the shares in `idle` sum to 1."""

    window_s: float
    training: float
    idle: Mapping[str, float]
    """Share of time without training, for each reason in `REASONS`."""

    @property
    def idle_share(self) -> float:
        return sum(self.idle.values())


def usual_hand_off_s(steps: Sequence[StepRecord]) -> float:
    """Return the median hand-off time of a step, in seconds: the time after its plan and the previous step's end that
    is neither training nor evaluation.

    Return 0 if there are no steps.
    """
    if not steps:
        return 0.0
    free_at = [float("-inf"), *(step.trained_at for step in steps[:-1])]
    return median(_after_plan(step, at)[0] for step, at in zip(steps, free_at, strict=True))


def learner_time(
    steps: Sequence[StepRecord], *, started_at: float, waits_since: tuple[str, float, float] | None = None
) -> LearnerTime | None:
    """Return how the learner's time divides into training and idle time over `steps`, which are in order; None if the
    steps give no measurement.

    Time counts from the end of the first of these steps. If that is the run's first step, time counts from the run's
    start. `waits_since` describes idle time after the last step: (reason, since, until).
    """
    seconds, training_s = dict.fromkeys(REASONS, 0.0), 0.0
    usual = usual_hand_off_s(steps)
    before = started_at if steps and steps[0].step == 1 else None
    for step in steps:
        if before is not None:
            seconds["start" if step.step == 1 else "rollouts"] += max(0.0, step.planned_at - before)
            hand_off_s, evaluation_s, train_s = _after_plan(step, before)
            is_usual = hand_off_s <= max(NOT_A_HAND_OFF_S, NOT_USUAL * usual)
            seconds["hand_off"] += hand_off_s if is_usual else usual
            seconds["down"] += 0.0 if is_usual else hand_off_s - usual
            seconds["evaluation"] += evaluation_s
            training_s += train_s
        before = step.trained_at
    if waits_since is not None:
        reason, since, until = waits_since
        seconds[reason] += max(0.0, until - since)
    window_s = training_s + sum(seconds.values())
    if window_s <= 0:
        return None
    return LearnerTime(
        window_s=window_s,
        training=training_s / window_s,
        idle={reason: spent / window_s for reason, spent in seconds.items()},
    )


def _after_plan(step: StepRecord, free_at: float) -> tuple[float, float, float]:
    """Return the seconds of hand-off, evaluation and training in this step, from the moment when the step is planned
    and the learner is free.
    """
    lasted_s = max(0.0, step.trained_at - max(step.planned_at, free_at))
    train_s = min(step.figures.get(SECONDS.key) or 0.0, lasted_s)
    evaluation_s = min(step.figures.get(EVAL_S.key) or 0.0, lasted_s - train_s)
    return lasted_s - train_s - evaluation_s, evaluation_s, train_s
