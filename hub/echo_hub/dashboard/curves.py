"""The charts' curves, /api/v1/curves: all steps of the run in a bounded number of points.

A point stands for `width` consecutive steps. The width is a power of two; if there are more than `MOST_POINTS` points,
it doubles. Points stay in memory, and each step is read from the database once. So an answer costs the same at step 100
and at step 100,000.

The mean reward is smoothed step by step, independent of `width`, by an exponential mean: the step `SMOOTHED_OVER` steps
ago has the weight 1/e. The standard deviation about that mean uses the same weights. A point holds the values of its
last step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from math import exp, sqrt
from typing import Final, Literal

from aiohttp import web

from echo_hub.dashboard.responses import json_response, whole_number
from echo_hub.dashboard.source import PagesSource
from echo_shared.records import step_figures
from echo_shared.records.run import StepRecord

MOST_POINTS: Final = 600
"""Largest number of points in the curves, about a chart's width in pixels."""
SMOOTHED_OVER: Final = 6.0
"""Decay length of the smoothed reward, in steps. A few steps are enough: one step's mean covers dozens of rollouts, and
a run's trend takes dozens of steps.
"""
TREND_OVER: Final = 12
"""Distance in steps between the two smoothed rewards that the trend compares. It is twice the decay length, so that the
two means share little data.
"""
LEAST_TREND: Final = 8
"""Number of steps needed before a trend is reported."""
CLEAR: Final = 3.0
"""Number of standard errors that a trend must exceed to count as rising or falling. A smaller trend may be chance."""
SMOOTH: Final = "reward_smooth"
SPREAD: Final = "reward_spread"


def _means() -> tuple[str, ...]:
    """Return the keys of the figures for which a point shows the mean over its steps. A step without a figure does not
    count for that figure."""
    return ("mean_reward", "staleness_mean", *(f.key for f in step_figures.STEP_FIGURES if not f.largest))


def _largest() -> tuple[str, ...]:
    return ("staleness_max", *(f.key for f in step_figures.STEP_FIGURES if f.largest))


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveMark:
    """Mark of the points that a browser already has: points of `width` steps each, up to step `step`."""

    width: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    now: float
    before: float
    steps: int
    """Distance in steps between `before` and `now`."""
    direction: Literal["rising", "steady", "falling", ""]
    """The direction of the trend; "" if the run has too few steps for a trend."""


class Smoothed:
    """Exponential mean and variance. The weights are normalised by their sum, so the first values are not biased."""

    def __init__(self) -> None:
        self._weight = self.mean = self._variance = 0.0

    def add(self, value: float) -> None:
        self._weight = 1.0 + self._weight * exp(-1.0 / SMOOTHED_OVER)
        share, away = 1.0 / self._weight, value - self.mean
        self.mean += share * away
        self._variance = (1.0 - share) * (self._variance + share * away * away)

    @property
    def deviation(self) -> float:
        return sqrt(self._variance)


@dataclass(slots=True, kw_only=True)
class _Point:
    """Sums over the steps that one point stands for. Two points are merged by adding their sums."""

    first_step: int
    step: int
    """Number of the last step for which the point stands."""
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    newest: dict[str, float] = field(default_factory=dict)
    """Figures of the point's last step. The point shows them unchanged."""
    rollouts: int = 0
    """Number of rollouts in the steps whose duration is known. Only the run's first step has no known duration."""
    seconds: float = 0.0
    """Sum of the durations, in seconds, of the steps that `rollouts` counts. A step lasts from the end of the previous
    step to its own end."""

    def take(self, other: _Point) -> None:
        self.step, self.newest = other.step, other.newest
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + other.counts[name]
        for name, value in other.largest.items():
            self.largest[name] = max(self.largest.get(name, value), value)
        self.rollouts += other.rollouts
        self.seconds += other.seconds

    def as_json(self) -> dict[str, float | None]:
        return {
            "step": self.step,
            "rollouts_per_s": _short(self.rollouts / self.seconds) if self.seconds > 0 else None,
            **{name: _short(value) for name, value in self.newest.items()},
            **{name: _short(self.sums[name] / self.counts[name]) if name in self.sums else None for name in _means()},
            **{name: _short(self.largest[name]) if name in self.largest else None for name in _largest()},
        }


def _short(value: float) -> float:
    """Round to six digits: charts cannot show more, and answers become a third as large."""
    return float(f"{value:.6g}")


class Curves:
    """The curves of a run. `add` takes its steps in order."""

    def __init__(self) -> None:
        self.width = 1
        self._points: list[_Point] = []
        self._newest: StepRecord | None = None
        self._reward = Smoothed()
        self._trend: deque[float] = deque(maxlen=TREND_OVER + 1)
        """The smoothed reward after each of the newest steps."""

    @property
    def last_step(self) -> int:
        return self._newest.step if self._newest else 0

    def add(self, step: StepRecord) -> None:
        self._reward.add(step.mean_reward)
        self._trend.append(self._reward.mean)
        point = _point(step, self._newest)
        point.newest = {SMOOTH: self._reward.mean, SPREAD: self._reward.deviation}
        self._newest = step
        if self._points and (step.step - 1) // self.width == (self._points[-1].first_step - 1) // self.width:
            self._points[-1].take(point)
            return
        self._points.append(point)
        if len(self._points) > MOST_POINTS:
            self._halve()

    def after(self, step: int) -> list[dict[str, float | None]]:
        return [point.as_json() for point in self._points if point.step > step]

    @property
    def trend(self) -> Trend | None:
        """Return the trend of the reward; None before the first step.

        A smoothed value has the standard error of a mean over about 2 * `SMOOTHED_OVER` steps. The deviation of the
        rewards contains the rise itself, which makes the error larger rather than smaller.
        """
        if not self._trend:
            return None
        before, now = self._trend[0], self._trend[-1]
        error = self._reward.deviation * sqrt(2 / (2 * SMOOTHED_OVER))
        direction: Literal["rising", "steady", "falling", ""] = "steady"
        if len(self._trend) < LEAST_TREND:
            direction = ""
        elif abs(now - before) > CLEAR * error:
            direction = "rising" if now > before else "falling"
        return Trend(now=now, before=before, steps=len(self._trend) - 1, direction=direction)

    def _halve(self) -> None:
        self.width *= 2
        halved: list[_Point] = []
        for point in self._points:
            if halved and (point.first_step - 1) // self.width == (halved[-1].first_step - 1) // self.width:
                halved[-1].take(point)
            else:
                halved.append(point)
        self._points = halved


def _point(step: StepRecord, before: StepRecord | None) -> _Point:
    of_the_books = {
        "mean_reward": step.mean_reward,
        "staleness_mean": step.staleness_mean,
        "staleness_max": step.staleness_max,
    }
    known = {name: value for name, value in {**of_the_books, **step.figures}.items() if value is not None}
    seconds = step.trained_at - before.trained_at if before else 0.0
    return _Point(
        first_step=step.step,
        step=step.step,
        sums={name: known[name] for name in _means() if name in known},
        counts={name: 1 for name in _means() if name in known},
        largest={name: known[name] for name in _largest() if name in known},
        rollouts=step.num_rollouts if before else 0,
        seconds=seconds,
    )


class CurvesRoom:
    def __init__(self, source: PagesSource) -> None:
        self._source = source
        self._curves = Curves()
        self._lock = asyncio.Lock()

    async def serve(self, request: web.Request) -> web.Response:
        """GET /api/v1/curves?width=W&since=N: new points for a browser that has the points of width W up to step N.

        The answer is {"width": ..., "points": [...]}. If the width has changed, the answer holds all points. Otherwise
        it holds the points with a step after N; the first of them may replace the browser's last point.
        """
        width, since = (whole_number(request.query.get(name, "0")) for name in ("width", "since"))
        if width is None or since is None:
            return json_response({"error": "width and since must be numbers: 0, 1, 2, ..."}, status=400)
        await self.newest()
        points = self._curves.after(since if width == self._curves.width else 0)
        return json_response({"width": self._curves.width, "points": points})

    async def news(self, mark: CurveMark | None) -> tuple[CurveMark, dict[str, object]]:
        """Return the new mark, and the points that a browser lacks. `mark` tells which points the browser has; None at
        the first call for a browser.

        The points are {"width": ..., "since": ..., "points": [...]}: the points of that width with a step after
        `since`. The first call returns no points, and neither does a call after a change of width. If a browser lacks
        earlier points, it requests /api/v1/curves.
        """
        await self.newest()
        now = CurveMark(width=self._curves.width, step=self._curves.last_step)
        since = mark.step if mark and mark.width == now.width else now.step
        return now, {"width": now.width, "since": since, "points": self._curves.after(since)}

    async def newest(self) -> Curves:
        """Read the newly trained steps, and return the curves over all steps."""
        async with self._lock:
            while True:
                more = await self._source.steps(self._curves.last_step)
                for step in more:
                    self._curves.add(step)
                if not more:
                    return self._curves
