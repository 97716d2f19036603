"""Flow-control windows: how many bytes may be sent but not yet confirmed. They are learnt from the times of end-to-end
confirmations, so that no buffer on the path hides a queue.

A window is the bandwidth-delay product plus slack: rate times (least delay + slack), after BBR (Cardwell et al., BBR:
Congestion-Based Congestion Control, 2016). With a smaller window the link idles between arrivals. A larger one only
lengthens the queue, and what waits in the queue was planned on older information than necessary.

Taken from BBR: the estimates of rate and delay; the rule for sender-limited rates, which count only as lower bounds;
and the start, in which a full window doubles with every round trip until a queue forms. There are no probing phases.
After the start, the slack makes the window slightly too large, so a link that becomes faster shows a higher rate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from statistics import fmean, median
from typing import Final

SAMPLE_S: Final = 0.1
"""Minimum seconds over which one sample of the rate is measured."""

SAMPLES_KEPT: Final = 20
"""Number of rate samples kept per window."""
DELAYS_KEPT_S: Final = 60.0
"""Length of a period in seconds. The least delay is measured over the current and the previous period; older delays are
forgotten, because routes change.
"""


class Window:
    """Flow-control window of one link: limit of the bytes that are sent but not confirmed.

    `first_bytes`: window before anything was measured. `slack_s`: seconds of queue that the window allows. `bursts`:
    True if arrivals come in bursts, so that the mean rate is used instead of the maximum.
    """

    def __init__(self, *, first_bytes: int, slack_s: float, bursts: bool = False) -> None:
        self.bytes_in_flight = 0
        self._start_bytes = first_bytes
        self._starting = True
        """True until an arrival is delayed by more than the slack: a queue has formed."""
        self._slack_s = slack_s
        self._bursts = bursts
        self.rate: float | None = None
        """Measured bytes per second: the maximum of recent samples, or their mean with `bursts`. None until
        measured."""
        self._rates: deque[float] = deque(maxlen=SAMPLES_KEPT)
        self._delays = (float("inf"), float("inf"))
        """Least delay, in seconds, in the current period of DELAYS_KEPT_S seconds and in the period before."""
        self._span_began = 0.0
        self._sample_began: float | None = None
        """When the present measurement of the rate began: at the first data after a silence. None during a silence."""
        self._sample_bytes = 0
        self._is_full = False
        """True if `has_room` last found the window full."""
        self._was_full = False
        """True if the window was full during the whole current sample."""
        self.kept_full = False
        """True if the rate was measured with a full window. Otherwise it is only a lower bound."""

    @property
    def steady_rate(self) -> float | None:
        """Return the typical arriving bytes per second with a full window; None until measured."""
        return median(self._rates) if len(self._rates) == SAMPLES_KEPT else None

    @property
    def delay(self) -> float:
        """Return the least seconds from sending to arrival; infinite until measured."""
        return min(self._delays)

    def size(self, least_bytes: int, slack_s: float | None = None) -> float:
        """Return the window in bytes: how many may be in flight. `slack_s` replaces the window's own seconds of
        queue."""
        known = 0.0
        if self.rate:
            known = self.rate * (self.delay + (self._slack_s if slack_s is None else slack_s))
        return max(least_bytes, known, self._start_bytes if self._starting or not self.rate else 0)

    def has_room(self, least_bytes: int) -> bool:
        """Return True if more may be sent now: bytes in flight are below the window, whose minimum is `least_bytes`."""
        self._is_full = self.bytes_in_flight >= self.size(least_bytes)
        return not self._is_full

    def sent(self, num_bytes: int, now: float) -> None:
        if self.bytes_in_flight == 0:
            self._sample_began = None
        self.bytes_in_flight += num_bytes

    def arrived(self, num_bytes: int, delay_s: float, now: float) -> None:
        """Record the arrival of bytes that were sent `delay_s` seconds ago."""
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
        """Take bytes out of flight that will not arrive or no longer matter."""
        self.bytes_in_flight -= num_bytes

    def _begin_sample(self, now: float) -> None:
        self._sample_began, self._sample_bytes, self._was_full = now, 0, True

    def _take_sample(self, rate: float) -> None:
        # A low rate with a window that was not full proves nothing.
        if self._was_full or rate > (self.rate or 0.0):
            self._rates.append(rate)
            self.rate = fmean(self._rates) if self._bursts else max(self._rates)
            self.kept_full |= self._was_full


PUSH_SLACK_S: Final = 0.25
"""Seconds of queue that the window of the hub's uplink allows. It also covers the wait of confirmations (`Have`) at the
nodes' uplinks."""

PATH_SLACK_S: Final = 0.3
"""Allowed queue on the path to one node in seconds: more than PUSH_SLACK_S, so that the hub's uplink, which all nodes
share, limits the sending."""

RELAY_SLACK_S: Final = 0.35
"""Seconds of work that an owner (a node that hands pieces on) may have queued."""

FIRST_PUSH_BYTES: Final = 256 * 1024
"""Window of the hub's uplink before anything was measured: 0.1 s at 20 Mbit/s."""
FIRST_PATH_BYTES: Final = 128 * 1024
FIRST_RELAY_BYTES: Final = 128 * 1024


HANDING_SLACK_S: Final = 0.35
"""Seconds of work that a node may have queued as copies to hand on. With more work queued, the hub orders no further
single copy from the node."""
LONGEST_SAMPLE_S: Final = 0.5
"""Longest time over which one sample of a busy node's rate is measured, in seconds."""
NEWEST_SHARE: Final = 0.3
"""Weight of the newest sample in the average rate of `Handing`."""


class Handing:
    """Copies of pieces that a node should hand on, and the node's measured rate."""

    __slots__ = ("_began_at", "_sample_bytes", "bytes_in_flight", "rate", "work_bytes")

    def __init__(self) -> None:
        self.bytes_in_flight = 0
        """Bytes of the copies whose pieces the node has already."""
        self.work_bytes = 0
        """Bytes of all assigned copies, including pieces that have not reached the node yet."""
        self.rate: float | None = None
        """Bytes per second at which the node hands copies on while it has copies to send; None until measured."""
        self._began_at = 0.0
        self._sample_bytes = 0

    def has_room(self, copy_bytes: int) -> bool:
        """Return True if the node would start another copy soon. Two copies are always allowed."""
        return self.bytes_in_flight < max(2 * copy_bytes, (self.rate or 0.0) * HANDING_SLACK_S)

    def sent(self, num_bytes: int, now: float) -> None:
        """Record additional copies that the node must hand on."""
        if not self.bytes_in_flight:
            self._began_at, self._sample_bytes = now, 0
        self.bytes_in_flight += num_bytes

    def arrived(self, num_bytes: int, now: float) -> None:
        """Record a copy's arrival at another node."""
        self._sample_bytes += num_bytes
        self.bytes_in_flight = left = max(0, self.bytes_in_flight - num_bytes)
        span_s = now - self._began_at
        if span_s > 0 and (not left or span_s > LONGEST_SAMPLE_S):
            rate = self._sample_bytes / span_s
            if self.rate is None:
                self.rate = rate
            elif self._sample_bytes > num_bytes or rate > self.rate:  # A single copy measures mostly its transit time.
                self.rate += NEWEST_SHARE * (rate - self.rate)
            self._began_at, self._sample_bytes = now, 0

    def lost(self, num_bytes: int) -> None:
        """Take a copy out of the node's work that will not arrive or no longer matters."""
        self.bytes_in_flight = max(0, self.bytes_in_flight - num_bytes)


@dataclass(slots=True)
class Path:
    """State of one node's path from the hub, and of the node's own uplink."""

    number: int = 0
    """Number of the node in trees and bit masks: the smallest one that was free when the node came."""
    push: Window = field(default_factory=lambda: Window(first_bytes=FIRST_PATH_BYTES, slack_s=PATH_SLACK_S))
    """Flow-control window of the pieces that the hub sends to the node."""
    relay: Window = field(
        default_factory=lambda: Window(first_bytes=FIRST_RELAY_BYTES, slack_s=RELAY_SLACK_S, bursts=True)
    )
    """Flow-control window of the pieces that the hub gave the node to hand on. A piece counts until the other nodes
    have it."""
    handing: Handing = field(default_factory=Handing)
    """Copies that the node has been told to send to others."""
    links: frozenset[str] = frozenset()
    """Nodes with which this node says it is linked."""
    has_confirmed: bool = False
    """True once the node has confirmed the arrival of a piece."""
    num_late: int = 0
    """Number of times in a row that the node failed to hand a piece on in time."""
    benched_until: float = 0.0
    """Time until which the node gets no pieces to hand on, after a failure to hand pieces on."""

    @property
    def proven(self) -> bool:
        """True if the node has confirmed a piece, and has not failed to hand a piece on since it last succeeded."""
        return not self.num_late and self.has_confirmed


class BroadcastPaths:
    """State shared by all broadcasts: the hub's uplink, and the path to every node."""

    def __init__(self) -> None:
        self.uplink = Window(first_bytes=FIRST_PUSH_BYTES, slack_s=PUSH_SLACK_S, bursts=True)
        self.links_changed = 0
        """Counter that grows with every change of the links between nodes."""
        self.news = 0
        """Counter that grows with every change that may give a broadcast something to send."""
        self._paths: dict[str, Path] = {}
        self._names: dict[int, str] = {}
        self._free: list[int] = []
        """Node numbers below the largest one in use that are free."""

    def __getitem__(self, node_id: str) -> Path:
        if (path := self._paths.get(node_id)) is None:
            number = heappop(self._free) if self._free else len(self._names)
            path = self._paths[node_id] = Path(number)
            self._names[number] = node_id
        return path

    def named(self, number: int) -> str | None:
        return self._names.get(number)

    def set_links(self, node_id: str, peer_ids: Iterable[str]) -> None:
        """Set the links that `node_id` reports, replacing earlier ones."""
        self[node_id].links = frozenset(peer_ids)
        self.links_changed += 1

    def forget(self, node_id: str) -> None:
        if (path := self._paths.pop(node_id, None)) is not None:
            del self._names[path.number]
            heappush(self._free, path.number)
            self.links_changed += 1
