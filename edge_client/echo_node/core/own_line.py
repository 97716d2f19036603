"""Estimate the speed of a node's own internet line from its links' traffic, and set their sending rate.

    .50 s   all links wait in a queue
    .75 s   all still wait, and 300 kB have arrived since
    1.00 s  the same again: the line carries 1.2 MB a second, and 1.04 may be sent from now on
    1.25 s  no queue: the limit grows to 1.06 MB a second, and further until a queue forms

Links share nothing but their node's line. A queue on several links at once therefore lies before that line: in the
owner's router, where it delays calls and games. TCP fills that queue whenever it can. Sending slightly below the line's
rate keeps the queue short, as LEDBAT does (RFC 6817), and loses no packets. LEDBAT yields on each connection; this
module does so for all links of a node together. Raising the rate a little at every measurement finds a line that
became faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from statistics import fmean
from typing import Final

from echo_shared.wire.sent import Sent

FEWEST_LINKS: Final = 2
"""Number of links that must send before their queues count. A single link's queue may lie before the other node, which
could otherwise slow this node down with late acknowledgements.
"""
LOOK_S: Final = 0.25
"""Seconds between two measurements. A line of 10 Mbit/s carries 200 packets in this time."""
SHARE: Final = 0.87
"""Share of the measured rate to use. The rest is for packet headers and for acknowledgements of received data."""
GROWTH: Final = 1.02
"""Growth factor of the rate per measurement, while most of the rate is used and no queue is seen."""
USED_SHARE: Final = 0.7
"""Share of the rate that must be used before the rate grows: less traffic proves nothing about the line."""
LEAST_SHARE: Final = 0.25
"""Smallest rate, as a share of the highest measured one: other programs and devices may keep the line's queue full."""
REFUTED: Final = 1.25
"""Factor above the full line's measured rate. Traffic of this rate without a queue proves a new or faster line."""
FEWEST_LOOKS, MOST_LOOKS = 2, 8
"""Least and greatest number of measurements of a full line whose mean is its rate: packets arrive in bursts, and lines
change.
"""


class OwnLine:
    """Estimator of the rate of this node's internet line. Call `saw` with all links every LOOK_S while any link
    sends.
    """

    def __init__(self) -> None:
        self.rate: float | None = None
        """Allowed bytes per second; None: no full line was measured."""
        self._carried: deque[float] = deque(maxlen=MOST_LOOKS)
        """Bytes per second in the newest measurements of a full line."""
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
