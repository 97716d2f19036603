"""How much may be on its way at once, learnt from when it arrives: end to end, so no buffer on the way hides a queue.

A window is the bandwidth-delay product and some slack: rate times (least delay + slack), after BBR (Cardwell et al.,
BBR: Congestion-Based Congestion Control, 2016). With less the link idles between arrivals; what is more only queues
up, and was planned on older news than it had to be.

Of BBR it keeps the two estimates, the rule for samples that were limited by the sender, and the start: a full window
doubles with every round trip until a queue forms. It has no probing phases: afterwards the slack alone makes the window
grow for as long as the rate grows with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from statistics import fmean, median
from typing import Final

SAMPLE_S: Final = 0.1
"""A rate is measured over at least this long."""

SAMPLES_KEPT: Final = 20
DELAYS_KEPT_S: Final = 60.0
"""The least delay is that of the last such span or two: routes change."""


class Window:
    """`first_bytes` may be on their way at first. `bursts`: what arrives comes in bursts, which exaggerate the rate."""

    def __init__(self, *, first_bytes: int, slack_s: float, bursts: bool = False) -> None:
        self.bytes_in_flight = 0
        self._start_bytes = first_bytes
        self._starting = True
        """No queue has formed yet."""
        self._slack_s = slack_s
        self._bursts = bursts
        self.rate: float | None = None
        """Bytes per second that arrive, at best, or with bursts on average; None until measured."""
        self._rates: deque[float] = deque(maxlen=SAMPLES_KEPT)
        self._delays = (float("inf"), float("inf"))
        """The least delay of the current span, and of the one before."""
        self._span_began = 0.0
        self._sample_began: float | None = None
        """When the rate's sample began, which the first arrival after a silence does; None during a silence."""
        self._sample_bytes = 0
        self._is_full = False
        """No room was left when room was last asked for."""
        self._was_full = False
        """The window was full all through the current sample."""
        self.kept_full = False
        """The rate was measured while as much as may be was on its way; else it is no more than a lower bound."""

    @property
    def steady_rate(self) -> float | None:
        """Bytes per second that arrive as a rule while as much as may be is on its way; None until measured."""
        return median(self._rates) if len(self._rates) == SAMPLES_KEPT else None

    @property
    def delay(self) -> float:
        """Seconds from sending to arrival, at least; infinite until measured."""
        return min(self._delays)

    def size(self, least_bytes: int, slack_s: float | None = None) -> float:
        """Bytes that may be on their way; another slack than the window's own asks for another depth of queue."""
        known = 0.0
        if self.rate:
            known = self.rate * (self.delay + (self._slack_s if slack_s is None else slack_s))
        return max(least_bytes, known, self._start_bytes if self._starting or not self.rate else 0)

    def has_room(self, least_bytes: int) -> bool:
        """Whether more may be sent; `least_bytes` are always let through."""
        self._is_full = self.bytes_in_flight >= self.size(least_bytes)
        return not self._is_full

    def sent(self, num_bytes: int, now: float) -> None:
        if self.bytes_in_flight == 0:
            self._sample_began = None
        self.bytes_in_flight += num_bytes

    def arrived(self, num_bytes: int, delay_s: float, now: float) -> None:
        """Bytes that were sent `delay_s` ago have arrived."""
        self.bytes_in_flight -= num_bytes
        if now - self._span_began > DELAYS_KEPT_S:
            self._delays, self._span_began = (delay_s, self._delays[0]), now
        elif delay_s < self._delays[0]:
            self._delays = (delay_s, self._delays[1])
        if self._starting:
            self._starting = delay_s <= self.delay + self._slack_s
            self._start_bytes += num_bytes if self._is_full else 0
        if self._sample_began is None:
            self._begin_sample(now)
            return
        self._sample_bytes += num_bytes
        self._was_full &= self._is_full
        if now - self._sample_began >= SAMPLE_S:
            self._take_sample(self._sample_bytes / (now - self._sample_began))
            self._begin_sample(now)

    def lost(self, num_bytes: int) -> None:
        """Bytes will not arrive, or it does not matter any more when they do."""
        self.bytes_in_flight -= num_bytes

    def _begin_sample(self, now: float) -> None:
        self._sample_began, self._sample_bytes, self._was_full = now, 0, True

    def _take_sample(self, rate: float) -> None:
        # A sender that had nothing more to send learns nothing from a low rate.
        if self._was_full or rate > (self.rate or 0.0):
            self._rates.append(rate)
            self.rate = fmean(self._rates) if self._bursts else max(self._rates)
            self.kept_full |= self._was_full


PUSH_SLACK_S: Final = 0.25
"""Seconds of queue at the hub's uplink, and of what `Have` waits behind at a node's, which is busy with handing on."""

PATH_SLACK_S: Final = 0.3
"""Seconds of queue before one node: more, so that it is the shared uplink's window that paces."""

RELAY_SLACK_S: Final = 0.35
"""Seconds of relay work that waits at a node."""

FIRST_PUSH_BYTES: Final = 256 * 1024
"""0.1 s of an uplink of 20 Mbit/s."""
FIRST_PATH_BYTES: Final = 128 * 1024
FIRST_RELAY_BYTES: Final = 128 * 1024


HANDING_SLACK_S: Final = 0.35
"""Seconds of copies that wait at a node's uplink, of those that the hub asks for one by one."""
LONGEST_SAMPLE_S: Final = 0.5
NEWEST_SHARE: Final = 0.3
"""Of the newest sample, in a rate."""


class Handing:
    """Copies that a node hands on, each of them counted: how fast it does while it has any."""

    __slots__ = ("_began_at", "_sample_bytes", "bytes_in_flight", "rate", "work_bytes")

    def __init__(self) -> None:
        self.bytes_in_flight = 0
        """Of pieces that the node has."""
        self.work_bytes = 0
        """All that it is to hand on, of pieces that have not come to it too."""
        self.rate: float | None = None
        """Bytes per second; None until measured."""
        self._began_at = 0.0
        self._sample_bytes = 0

    def has_room(self, copy_bytes: int) -> bool:
        """Whether another copy would be under way before long; two may always be."""
        return self.bytes_in_flight < max(2 * copy_bytes, (self.rate or 0.0) * HANDING_SLACK_S)

    def sent(self, num_bytes: int, now: float) -> None:
        """The node has more to hand on."""
        if not self.bytes_in_flight:
            self._began_at, self._sample_bytes = now, 0
        self.bytes_in_flight += num_bytes

    def arrived(self, num_bytes: int, now: float) -> None:
        """One more copy has come to another node."""
        self._sample_bytes += num_bytes
        self.bytes_in_flight = left = max(0, self.bytes_in_flight - num_bytes)
        span_s = now - self._began_at
        if span_s > 0 and (not left or span_s > LONGEST_SAMPLE_S):
            rate = self._sample_bytes / span_s
            if self.rate is None:
                self.rate = rate
            elif self._sample_bytes > num_bytes or rate > self.rate:  # Of a lone copy the most is the way to the other.
                self.rate += NEWEST_SHARE * (rate - self.rate)
            self._began_at, self._sample_bytes = now, 0

    def lost(self, num_bytes: int) -> None:
        """A copy will not come, or it does not matter any more whether it does."""
        self.bytes_in_flight = max(0, self.bytes_in_flight - num_bytes)


@dataclass(slots=True)
class Path:
    """What is known of the way to one node, and of its own uplink."""

    number: int = 0
    """The smallest that no other node had when it came: what trees, and sets of nodes, know it by."""
    push: Window = field(default_factory=lambda: Window(first_bytes=FIRST_PATH_BYTES, slack_s=PATH_SLACK_S))
    """The window of what goes from the hub to the node."""
    relay: Window = field(
        default_factory=lambda: Window(first_bytes=FIRST_RELAY_BYTES, slack_s=RELAY_SLACK_S, bursts=True)
    )
    """Pieces that the node is to hand on, until its peers have them."""
    handing: Handing = field(default_factory=Handing)
    """Copies of pieces, from the node to others."""
    links: frozenset[str] = frozenset()
    """The nodes that it says it is linked with."""
    has_confirmed: bool = False
    """It has said that something arrived."""
    num_late: int = 0
    """Times in a row that it failed as an owner of pieces."""
    benched_until: float = 0.0
    """When it may own pieces again."""

    @property
    def proven(self) -> bool:
        """Whether it has ever said that something arrived, and has not failed as an owner since it last did well."""
        return not self.num_late and self.has_confirmed


class Paths:
    """What all broadcasts share: the hub's uplink, and a path to every node."""

    def __init__(self) -> None:
        self.uplink = Window(first_bytes=FIRST_PUSH_BYTES, slack_s=PUSH_SLACK_S, bursts=True)
        self.links_changed = 0
        """Counts the changes of who is linked with whom."""
        self.news = 0
        """Counts what may have given some broadcast something to send."""
        self._paths: dict[str, Path] = {}
        self._names: dict[int, str] = {}
        self._free: list[int] = []
        """Numbers below the largest that nobody has."""

    def __getitem__(self, node_id: str) -> Path:
        if (path := self._paths.get(node_id)) is None:
            number = heappop(self._free) if self._free else len(self._names)
            path = self._paths[node_id] = Path(number)
            self._names[number] = node_id
        return path

    def named(self, number: int) -> str | None:
        """The node that has this number, if any has."""
        return self._names.get(number)

    def set_links(self, node_id: str, peer_ids: Iterable[str]) -> None:
        """`peer_ids` are all nodes that `node_id` says it is linked with."""
        self[node_id].links = frozenset(peer_ids)
        self.links_changed += 1

    def forget(self, node_id: str) -> None:
        if (path := self._paths.pop(node_id, None)) is not None:
            del self._names[path.number]
            heappush(self._free, path.number)
            self.links_changed += 1
