"""Time spans of some steps of a periodic schedule, from which a page draws a diagram."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal

from echo_hub.core.capacity.model import Pool, Workload
from echo_hub.core.capacity.schedule import PlannedStep, steps

Lane = Literal["training", "waiting", "broadcast", "sampling"]

SETTLED: Final = 20
"""Number of publications before the drawing begins: after them the schedule repeats."""

STEPS_DRAWN: Final = 6
"""Default number of steps in the drawing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpan:
    """Span from `begin_s` to `end_s`, in seconds from the left edge of the picture."""

    lane: Lane
    begin_s: float
    end_s: float
    number: int
    """Step number (training, waiting) or version number (broadcast, sampling)."""


def timeline(workload: Workload, pool: Pool, *, num_steps: int = STEPS_DRAWN) -> tuple[TimeSpan, ...]:
    """Return the time spans of `num_steps` steps, and of the broadcasts and sampling meanwhile. The pool must not be
    empty."""
    first = SETTLED * workload.publish_every + 1
    played = list(islice(steps(workload, pool), first + num_steps - 1))
    shown = played[first - 1 :]
    begin, end = shown[0].planned_at - shown[0].waited_s, shown[-1].trained_at
    spans = [span for step in shown for span in _of_learner(step)]
    spans += _of_versions(workload, played, end)
    return tuple(
        TimeSpan(lane=s.lane, begin_s=max(s.begin_s, begin) - begin, end_s=min(s.end_s, end) - begin, number=s.number)
        for s in spans
        if s.begin_s < end and s.end_s > max(begin, s.begin_s)
    )


def _of_learner(step: PlannedStep) -> list[TimeSpan]:
    trains = TimeSpan(lane="training", begin_s=step.planned_at, end_s=step.trained_at, number=step.step)
    if not step.waited_s:
        return [trains]
    since = step.planned_at - step.waited_s
    return [TimeSpan(lane="waiting", begin_s=since, end_s=step.planned_at, number=step.step), trains]


def _of_versions(workload: Workload, played: list[PlannedStep], end: float) -> list[TimeSpan]:
    """Return each version's broadcast span and sampling span. A version is sampled until the next one arrives; with a
    staleness bound of 0, only until its step has enough rollouts."""
    spans = []
    enough_at = {step.step - 1: step.planned_at for step in played} if workload.staleness_bound == 0 else {}
    published = [(step.step, step.trained_at, step.arrived_at) for step in played if step.arrived_at is not None]
    sent_at = 0.0
    for (number, trained_at, arrived_at), after in zip(published, [*published[1:], None], strict=True):
        spans.append(TimeSpan(lane="broadcast", begin_s=max(trained_at, sent_at), end_s=arrived_at, number=number))
        until = after[2] if after else end
        spans.append(
            TimeSpan(lane="sampling", begin_s=arrived_at, end_s=min(until, enough_at.get(number, until)), number=number)
        )
        sent_at = arrived_at
    return spans
