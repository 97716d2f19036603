"""Hourly figures of a simulated run: connected nodes, learner utilisation, leased and dropped rollouts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import Final

from echo_shared.wire.messages import DropReason

HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HourFigures:
    """Figures of one hour of virtual time; the last one may be shorter."""

    nodes: float
    """Average number of connected honest nodes."""
    utilisation: float
    """Share of the hour in which the learner trained a step."""
    leased: int
    dropped: dict[str, int]


class Hours:
    def __init__(self) -> None:
        self._leased: Counter[int] = Counter()
        self._dropped: defaultdict[int, Counter[DropReason]] = defaultdict(Counter)
        self._node_s: defaultdict[int, float] = defaultdict(float)
        self._nodes = 0
        self._since = 0.0

    def lease(self, count: int, now: float) -> None:
        self._leased[int(now // HOUR_S)] += count

    def drop(self, reason: DropReason, count: int, now: float) -> None:
        self._dropped[int(now // HOUR_S)][reason] += count

    def connect(self, count: int, now: float) -> None:
        """Change the number of connected honest nodes by `count`, which may be negative."""
        self._count_nodes(now)
        self._nodes += count

    def figures(self, steps: Iterable[tuple[float, float]], until: float) -> tuple[HourFigures, ...]:
        """Return the figures of all hours. `steps`: (begin, end) of each step; `until`: end of the run."""
        self._count_nodes(until)
        busy_s: defaultdict[int, float] = defaultdict(float)
        for begin, end in steps:
            for hour, seconds in _by_hour(begin, min(end, until)):
                busy_s[hour] += seconds
        return tuple(
            HourFigures(
                nodes=self._node_s[hour] / min(HOUR_S, until - hour * HOUR_S),
                utilisation=busy_s[hour] / min(HOUR_S, until - hour * HOUR_S),
                leased=self._leased[hour],
                dropped={str(reason): count for reason, count in sorted(self._dropped[hour].items())},
            )
            for hour in range(ceil(until / HOUR_S))
        )

    def _count_nodes(self, now: float) -> None:
        for hour, seconds in _by_hour(self._since, now):
            self._node_s[hour] += self._nodes * seconds
        self._since = now


def _by_hour(begin: float, end: float) -> Iterator[tuple[int, float]]:
    """Split a time span into (hour, seconds)."""
    while begin < end:
        hour = int(begin // HOUR_S)
        stop = min(end, (hour + 1) * HOUR_S)
        yield hour, stop - begin
        begin = stop
