"""Progress of a benchmark: wanted cases, a line with figures for each finished case, and the remaining time.

A benchmark plans all cases first. It measures the cases that `--only` names, except those that the machine cannot
measure. These are printed at the start and listed in the JSON file.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

PACKAGES = (
    "echo-swarm",
    "torch",
    "transformers",
    "peft",
    "llama-cpp-python",
    "mlx",
    "mlx-lm",
    "libtorrent",
    "aiohttp",
    "websockets",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Results of a benchmark: `headline` has the main figures by name, `rows` all figures as one table."""

    headline: dict[str, Any]
    rows: list[dict[str, Any]]
    shown: tuple[str, ...] = ()
    """Columns to print; empty: all. The JSON file has all columns."""
    conditions: dict[str, Any] = field(default_factory=dict)


def conditions(seed: int) -> dict[str, Any]:
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": versions,
        "seed": seed,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One planned case; `--only` selects cases by name."""

    name: str
    seconds: float
    """Expected seconds on two cores of a server."""
    lacks: str = ""
    """Why this machine cannot measure the case; "" if it can."""


class NoSuchCase(Exception):
    """Error: a pattern of `--only` matches no planned case."""


class Progress:
    """The cases of one run of a benchmark. `only` has case-insensitive patterns with * and ?, as in a shell; empty: all
    cases. Raises NoSuchCase.
    """

    def __init__(
        self,
        planned: Sequence[Planned],
        only: Sequence[str] = (),
        *,
        say: Callable[[str], object] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for pattern in only:
            if not any(_fits(case.name, pattern) for case in planned):
                names = "; ".join(case.name for case in planned)
                raise NoSuchCase(f"there is no case {pattern!r}; there is: {names}")
        chosen = [case for case in planned if not only or any(_fits(case.name, pattern) for pattern in only)]
        self._waiting = {case.name: case.seconds for case in chosen if not case.lacks}
        self._say = say
        self._clock = clock
        self._began_at = clock()
        self._num_cases = len(self._waiting)
        self._done_s = 0.0
        self.left_out = {case.name: case.lacks for case in chosen if case.lacks}
        """Reason for each planned case that is not measured."""
        self.told: list[dict[str, Any]] = []
        self.so_far: Measurement | None = None
        """Result of the finished cases. A benchmark may set this result to keep it if a later case fails."""

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began_at

    def begin(self) -> None:
        plan = sum(self._waiting.values())
        count = "1 case" if self._num_cases == 1 else f"{self._num_cases} cases"
        self._say(f"{count}, about {_clock_time(plan)} on two cores of a server{self._following}")
        for name, why in self.left_out.items():
            self._say(f"left out: {name}: {why}")

    def wants(self, name: str) -> bool:
        return name in self._waiting

    def done(self, name: str, figures: Mapping[str, Any]) -> None:
        """Record that the case `name` is finished. Print its figures, the elapsed time and the remaining time."""
        self._done_s += self._waiting.pop(name)
        self.told.append({"case": name, **figures})
        rest_s = self.elapsed_s * sum(self._waiting.values()) / self._done_s
        told = ", ".join(f"{key} {as_text(value)}" for key, value in figures.items())
        place = f"{self._num_cases - len(self._waiting)}/{self._num_cases}"
        times = f"{_clock_time(self.elapsed_s)} so far, {_clock_time(rest_s)} to go{self._following}"
        self._say(f"[{place}] {name}: {told} ({times})")

    @property
    def _following(self) -> str:
        return f"; next: {next(iter(self._waiting))}" if self._waiting else ""

    def leave_out(self, name: str, why: str) -> None:
        """Omit a case that was wanted, and print the reason."""
        del self._waiting[name]
        self.left_out[name] = why
        self._say(f"left out: {name}: {why}")

    def repetitions(self, most: int, *, within_s: float, least: int = 1) -> Iterator[int]:
        """Yield 0, 1, ..., `most` - 1. After `least` repetitions, stop before a repetition that would end later than
        `within_s`.
        """
        began_at = self._clock()
        for number in range(most):
            elapsed_s = self._clock() - began_at
            if number >= least and elapsed_s * (number + 1) > within_s * number:
                return
            yield number

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": self.elapsed_s,
            "left_out": [{"case": name, "why": why} for name, why in self.left_out.items()],
        }


def as_text(value: object) -> str:
    """Return a figure as text, with four significant digits."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name.lower(), pattern.lower())


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min"


AsyncCase = tuple[Callable[[int], Coroutine[Any, Any, dict[str, Any]]], float]
"""Pair of a case's function and its expected seconds on two idle cores. The function takes the seed and returns
figures.
"""


def run_cases(
    cases: Mapping[str, AsyncCase],
    seed: int,
    progress: Progress,
    headline: Callable[[Mapping[str, Mapping[str, Any]]], dict[str, Any]],
) -> Measurement:
    """Run the wanted cases one after another. Return a row for each figure, and the headline of all finished cases."""
    done: dict[str, dict[str, Any]] = {}
    progress.so_far = Measurement(headline={}, rows=[])
    for name, (case, _) in cases.items():
        if progress.wants(name):
            done[name] = asyncio.run(case(seed))
            rows = [
                {"case": name, "figure": figure, "value": value}
                for name, figures in done.items()
                for figure, value in figures.items()
            ]
            progress.so_far = Measurement(headline=headline(done), rows=rows)
            progress.done(name, done[name])
    return progress.so_far


def least(rows: Iterable[Mapping[str, Any]], figure: str) -> Any:
    """Return the smallest value of a figure; None if no row has it."""
    return min((row[figure] for row in rows if row.get(figure) is not None), default=None)


def most(rows: Iterable[Mapping[str, Any]], figure: str) -> Any:
    """Return the largest value of a figure; None if no row has it."""
    return max((row[figure] for row in rows if row.get(figure) is not None), default=None)
