"""The charts' curves, /api/v1/curves: every step of the run, in a number of points that does not grow with it.

A point stands for `width` consecutive steps, a power of two that doubles when there are too many points. The points are
kept in memory and each step is read once, so an answer costs the same at step 100 and at step 100,000.

The mean reward is smoothed here, step by step, whatever a point stands for: an exponential mean over the steps so far,
of which one `SMOOTHED_OVER` steps ago weighs 1/e, and the standard deviation about it by the same weights. A point has
that of its last step.
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
from echo_shared import step_figures
from echo_shared.books import StepRecord

MOST_POINTS: Final = 600
"""About as many as a chart has pixels for."""
SMOOTHED_OVER: Final = 6.0
"""Steps: a step's mean is of dozens of rollouts or more, and what a run comes to takes dozens of steps."""
TREND_OVER: Final = 12
"""Steps that the trend is taken over: two times of the smoothing, so that its ends hardly share a step."""
LEAST_TREND: Final = 8
"""Steps without which nothing is said of a trend."""
CLEAR: Final = 3.0
"""Standard errors of a difference that is more than chance."""
SMOOTH: Final = "reward_smooth"
SPREAD: Final = "reward_spread"


def _means() -> tuple[str, ...]:
    """The figures of which a point has the mean, over its steps that have the figure."""
    return ("mean_reward", "staleness_mean", *(f.key for f in step_figures.STEP_FIGURES if not f.largest))


def _largest() -> tuple[str, ...]:
    """The figures of which a point has the largest value."""
    return ("staleness_max", *(f.key for f in step_figures.STEP_FIGURES if f.largest))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """How far somebody was told the curves: points of this width, up to this step."""

    width: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Where the smoothed reward goes."""

    now: float
    before: float
    steps: int
    """How many steps before that was."""
    direction: Literal["rising", "steady", "falling", ""]
    """Empty: too few steps."""


class Smoothed:
    """An exponential mean, which the first value does not weigh more in than any other."""

    def __init__(self) -> None:
        self._weight = self.mean = self._variance = 0.0

    def add(self, value: float) -> None:
        self._weight = 1.0 + self._weight * exp(-1.0 / SMOOTHED_OVER)
        share, away = 1.0 / self._weight, value - self.mean
        self.mean += share * away
        self._variance = (1.0 - share) * (self._variance + share * away * away)

    @property
    def deviation(self) -> float:
        """The standard deviation of the values, by the same weights."""
        return sqrt(self._variance)


@dataclass(slots=True, kw_only=True)
class _Point:
    """A point's sums over its steps, so that two points make one."""

    first_step: int
    step: int
    """The last."""
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    newest: dict[str, float] = field(default_factory=dict)
    """What it has of its last step alone."""
    rollouts: int = 0
    """Of the steps whose duration is known: all but the run's first."""
    seconds: float = 0.0
    """From the end of the step before each of them to its own."""

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
    """As far as a chart can show it: six digits that count, which is a third of what travels otherwise."""
    return float(f"{value:.6g}")


class Curves:
    """All steps so far, in order of `add`."""

    def __init__(self) -> None:
        self.width = 1
        self._points: list[_Point] = []
        self._newest: StepRecord | None = None
        self._reward = Smoothed()
        self._trend: deque[float] = deque(maxlen=TREND_OVER + 1)
        """The smoothed reward of the newest steps."""

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
        """The points that hold a step after `step`."""
        return [point.as_json() for point in self._points if point.step > step]

    @property
    def trend(self) -> Trend | None:
        """None before the first step. The mean of a smoothed value has the error of about twice `SMOOTHED_OVER` steps';
        what the reward has risen by of late is in its spread too, which makes a short rise no easier to see."""
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
        """GET /api/v1/curves?width=W&since=N: what is new for a viewer who has the points of width W up to step N.

        {"width": ..., "points": [...]}: all points where the width is another one by now, else those with a step after
        N, of which the first may replace the viewer's last.
        """
        width, since = (whole_number(request.query.get(name, "0")) for name in ("width", "since"))
        if width is None or since is None:
            return json_response({"error": "width and since must be numbers: 0, 1, 2, ..."}, status=400)
        await self.newest()
        points = self._curves.after(since if width == self._curves.width else 0)
        return json_response({"width": self._curves.width, "points": points})

    async def news(self, mark: Mark | None) -> tuple[Mark, dict[str, object]]:
        """What to tell a watcher who was told all up to `mark`, and the mark from then on; None = the first time, when
        it is told from where on it will be.

        {"width": ..., "since": ..., "points": [...]}: the points of that width with a step after `since`. Who does not
        have those before asks /api/v1/curves for what it lacks: so does everybody once the width is another.
        """
        await self.newest()
        now = Mark(width=self._curves.width, step=self._curves.last_step)
        since = mark.step if mark and mark.width == now.width else now.step
        return now, {"width": now.width, "since": since, "points": self._curves.after(since)}

    async def newest(self) -> Curves:
        """The curves with every step that is trained by now."""
        async with self._lock:
            while True:
                more = await self._source.steps(self._curves.last_step)
                for step in more:
                    self._curves.add(step)
                if not more:
                    return self._curves
