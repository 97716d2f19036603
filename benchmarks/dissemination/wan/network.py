"""Home links in virtual time, from the network card of one home to that of another, without I/O.

    uplink queue → uplink → lost? → delays of both homes, jitter → downlink queue → downlink

Each home has two lines of finite rate with a queue before each. A packet that finds the queue full is dropped. Packets
from one home to another keep their order. A frame of several packets (`segments`) is carried and lost packet by packet,
and continues as frames of the remaining packets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import Final

from benchmarks.dissemination.wan import segments

LEAST_QUEUE_BYTES: Final = 16_384
"""Least queue of a home router, however slow the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Rates of a home in megabits a second, and the one-way delay of its link in milliseconds."""

    up: float
    down: float
    delay_ms: float
    loss: float = 0.0
    """Share of packets in both directions that the home's own link loses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """Properties of all links. A queue holds as much as its line carries in these milliseconds."""

    loss: float
    """Share of lost packets, in addition to the losses of links."""
    jitter_ms: float
    """Largest additional delay; uniformly distributed from 0."""
    up_queue_ms: float
    down_queue_ms: float


class _Line:
    """One direction of one link, first in, first out."""

    __slots__ = ("_free_at", "_most_waiting_s", "_s_per_byte")

    def __init__(self, mbit_s: float, queue_ms: float) -> None:
        self._s_per_byte = 8e-6 / mbit_s
        self._most_waiting_s = max(queue_ms / 1e3, LEAST_QUEUE_BYTES * self._s_per_byte)
        self._free_at = 0.0

    def carry(self, num_bytes: int, at: float) -> float | None:
        """Carry a packet; return its departure time, or None for a full queue."""
        begins = self._free_at if self._free_at > at else at
        if begins - at > self._most_waiting_s:
            return None
        self._free_at = begins + num_bytes * self._s_per_byte
        return self._free_at


class Network:
    """Homes by number. `now` is in seconds and never decreases."""

    def __init__(self, homes: Sequence[Home], weather: Weather, rng: Random) -> None:
        self._up = [_Line(home.up, weather.up_queue_ms) for home in homes]
        self._down = [_Line(home.down, weather.down_queue_ms) for home in homes]
        self._delays_s = [home.delay_ms / 1e3 for home in homes]
        arrive = [1 - home.loss for home in homes]
        self._losses = [[1 - (1 - weather.loss) * one * other for other in arrive] for one in arrive]
        self._jitter_s = weather.jitter_ms / 1e3
        self._random = rng.random
        self._last_at: dict[tuple[int, int], float] = {}
        self._agenda: list[tuple[float, int, int, bytes, int]] = []
        """Time, order, target, frame, and its bytes before the downlink, or 0 after it."""
        self._order = 0
        self.counts: Counter[str] = Counter()
        """Packets `sent` into uplinks, `lost`, and dropped from a `full` queue."""

    @property
    def next_at(self) -> float | None:
        """Time of the next event."""
        return self._agenda[0][0] if self._agenda else None

    def send(self, source: int, target: int, frame: bytes, now: float) -> None:
        """Send a frame from a home's network card."""
        sizes = segments.sizes(frame)
        self.counts["sent"] += len(sizes)
        up, loss, begin, left_at = self._up[source], self._losses[source][target], 0, now
        for number, size in enumerate(sizes):
            through_at = up.carry(size, now)
            if through_at is not None and self._random() >= loss:
                left_at = through_at
                continue
            self.counts["full" if through_at is None else "lost"] += 1
            self._travel(source, target, frame, sizes, begin, number, left_at)
            begin = number + 1
        self._travel(source, target, frame, sizes, begin, len(sizes), left_at)

    def _travel(
        self, source: int, target: int, frame: bytes, sizes: list[int], begin: int, end: int, left_at: float
    ) -> None:
        """Carry the frame's packets `begin` to `end`, which have left the uplink."""
        if begin == end:
            return
        if end - begin < len(sizes):
            frame, sizes = segments.cut(frame, begin, end), sizes[begin:end]
        there_at = left_at + self._delays_s[source] + self._delays_s[target] + self._random() * self._jitter_s
        there_at = max(there_at, self._last_at.get((source, target), 0.0))
        self._last_at[source, target] = there_at
        self._push(there_at, target, frame, sum(sizes))

    def deliver(self, now: float) -> Iterator[tuple[int, bytes]]:
        """Frames that have passed a downlink by now: target and frame."""
        agenda = self._agenda
        while agenda and agenda[0][0] <= now:
            at, _, target, frame, num_bytes = heappop(agenda)
            if not num_bytes:
                yield target, frame
                continue
            through_at = self._down[target].carry(num_bytes, at)
            if through_at is None:
                self.counts["full"] += len(segments.sizes(frame))
            else:
                self._push(through_at, target, frame, 0)

    def _push(self, at: float, target: int, frame: bytes, num_bytes: int) -> None:
        self._order += 1
        heappush(self._agenda, (at, self._order, target, frame, num_bytes))
