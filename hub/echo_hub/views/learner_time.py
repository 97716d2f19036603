"""Where the learner's time goes, over the newest steps: what it trains, and why it does not.

    trained          planned               taken up        trained
    step k - 1 ──────── step k ──────────────── step k ──────── step k
               rollouts        hand_off, evaluation,    training
               or start        down

A plan is made the moment that a step's rollouts are there, perhaps while the step before is still trained; so what a
free learner has before it is waiting for rollouts; before the run's first step it is the run's start. What is behind
the plan, with the learner free, and is not training is the step's way to
the learner. Of that, evaluations are told by the learner itself; what is far more than usual was not the hand-off: the
learner, or the hub, was down and came back. Nothing in the books tells apart a hub that was stopped while it waited for
rollouts and one that waited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from echo_shared.books import StepRecord
from echo_shared.step_figures import EVAL_S, SECONDS

REASONS: Final = ("rollouts", "hand_off", "evaluation", "down", "start")

NOT_A_HAND_OFF_S: Final = 1.0
"""A hand-off that takes less is never taken for a learner that was down: it comes back no sooner."""

NOT_USUAL: Final = 5.0
"""Times the usual hand-off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerTime:
    """Shares of the window, 0..1; all together they are 1."""

    window_s: float
    training: float
    idle: Mapping[str, float]
    """By all of `REASONS`."""

    @property
    def idle_share(self) -> float:
        return sum(self.idle.values())


def usual_hand_off_s(steps: Sequence[StepRecord]) -> float:
    """Seconds from a step's plan, the step before ended, to its end that are neither training nor evaluation; 0 of no
    steps."""
    if not steps:
        return 0.0
    free_at = [float("-inf"), *(step.trained_at for step in steps[:-1])]
    return median(_after_plan(step, at)[0] for step, at in zip(steps, free_at, strict=True))


def learner_time(
    steps: Sequence[StepRecord], *, started_at: float, waits_since: tuple[str, float, float] | None = None
) -> LearnerTime | None:
    """Over `steps`, in order, from the end of the first, or from the run's start where that is the run's first. None
    while nothing is known.

    `waits_since`: a reason, and since when and until when the learner has been idle after the last of them.
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
    """Seconds of hand-off, of evaluation and of training from when the step was planned and the learner free."""
    lasted_s = max(0.0, step.trained_at - max(step.planned_at, free_at))
    train_s = min(step.figures.get(SECONDS.key) or 0.0, lasted_s)
    evaluation_s = min(step.figures.get(EVAL_S.key) or 0.0, lasted_s - train_s)
    return lasted_s - train_s - evaluation_s, evaluation_s, train_s
