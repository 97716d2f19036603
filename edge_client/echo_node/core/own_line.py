"""Estimates the rate of a node's own internet line from the traffic of its links (connections to other nodes), and
limits the links' sending rate to slightly less.

    .50 s   packets of all links wait in a queue
    .75 s   packets of all links still wait, and 300 kB have arrived since
    1.00 s  the same again: the line carries 1.2 MB a second; from now on 1.04 (`SHARE` of it) may be sent
    1.25 s  no queue: the limit grows by `GROWTH` to 1.06 MB a second, and further until a queue forms

The links of a node have only the node's line in common. A queue on several links at the same time therefore lies before
that line: in the owner's router, where it delays calls and games. TCP fills that queue whenever it can. Sending
slightly below the line's rate keeps the queue short and loses no packets. LEDBAT (RFC 6817) does so for each connection
by itself; this module does so for all links of a node together. The rate grows a little at every measurement without a
queue, so a line that became faster is found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from statistics import fmean
from typing import Final

from echo_shared.wire.sent import Sent

FEWEST_LINKS: Final = 2
"""Minimum number of sending links at which a queue counts as a queue of this node's own line. The queue of a single
link may lie at the other node, which could feign it with late acknowledgements to slow this node down.
"""
LOOK_S: Final = 0.25
"""Seconds between two measurements. Even a slow line of 10 Mbit/s carries 200 packets in this time."""
SHARE: Final = 0.87
"""Fraction of the measured rate that links may use. The rest is for packet headers, and for acknowledgements of
received data.
"""
GROWTH: Final = 1.02
"""Growth factor of the rate per measurement without a queue, while links use most of the rate."""
USED_SHARE: Final = 0.7
"""Fraction of the rate that traffic must use before the rate grows: less traffic does not measure the line."""
LEAST_SHARE: Final = 0.25
"""Smallest rate, as a fraction of the highest measured one. Without it, other programs that keep the line's queue full
would push the rate ever lower.
"""
REFUTED: Final = 1.25
"""If traffic without a queue exceeds the measured rate by this factor, the line is new or has become faster."""
FEWEST_LOOKS, MOST_LOOKS = 2, 8
"""Minimum and maximum number of measurements of a full line that are averaged: packets arrive in bursts, and lines
change.
"""


class OwnLine:
    """Estimate of the rate of this node's internet line. Call `saw` with all links every LOOK_S seconds while any link
    sends.
    """

    def __init__(self) -> None:
        self.rate: float | None = None
        """Bytes per second that all links together may send; None: no full line was measured yet."""
        self._carried: deque[float] = deque(maxlen=MOST_LOOKS)
        """Bytes per second in each of the newest measurements of a full line."""
        self._most = 0.0
        self._links: Mapping[Hashable, Sent] = {}
        """Counters of the links at the last measurement."""
        self._looked_at = 0.0
        self._was_full = False

    def saw(self, links: Mapping[Hashable, Sent], now: float) -> None:
        """Record the links' counters at `now`, and adjust `rate`."""
        last, took_s, was_full = self._links, now - self._looked_at, self._was_full
        arrived = {name: sent.arrived_bytes - last[name].arrived_bytes for name, sent in links.items() if name in last}
        sending = [name for name, num_bytes in arrived.items() if num_bytes > 0]
        is_full = len(sending) >= FEWEST_LINKS and all(links[name].queues for name in sending)
        self._links, self._looked_at, self._was_full = links, now, is_full
        if not sending or not 0 < took_s <= 2 * LOOK_S:
            return
        rate = sum(arrived[name] for name in sending) / took_s
        if is_full and was_full:
            self._carried.append(rate)
            self._most = max(self._most, usual := fmean(self._carried))
            if len(self._carried) >= FEWEST_LOOKS:
                self.rate = max(SHARE * usual, LEAST_SHARE * self._most)
        elif self.rate is not None and not is_full and rate > USED_SHARE * self.rate:
            self.rate *= GROWTH
            if self._carried and rate > REFUTED * fmean(self._carried):
                self._carried.clear()
