"""Estimate the speed of a node's own internet line from its links' traffic, and set their sending rate.

    .50 s   all links wait in a queue
    .75 s   all still wait, and 300 kB have arrived since
    1.00 s  the same again: the line carries 1.2 MB a second, and 1.04 may be sent from now on
    1.25 s  no queue: the limit grows to 1.06 MB a second, and further until a queue forms

Links share nothing but their node's line. A queue on several links at once therefore lies before that line: in the
owner's router, where it delays calls and games. TCP fills that queue whenever it can. Sending slightly below the line's
rate keeps the queue short, as LEDBAT does (RFC 6817), and loses no packets. LEDBAT yields on each connection; this
module does so for all links of a node together. Raising the rate a little at every look finds a line that became
faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from statistics import fmean
from typing import Final

from echo_shared.wire.sent import Sent

FEWEST_LINKS: Final = 2
"""Minimum number of sending links. A single link's queue may lie before the other end, which could slow this node down
with late answers.
"""
LOOK_S: Final = 0.25
"""Interval between two looks, in seconds; on a line of 10 Mbit/s that is 200 packets."""
SHARE: Final = 0.87
"""Share of the measured rate to use: acknowledgements of received data and packet headers need the rest."""
GROWTH: Final = 1.02
"""Growth of the rate per look while no queue is seen and most of the rate is used."""
USED_SHARE: Final = 0.7
"""Minimum used share of the rate before growth: less traffic proves nothing."""
LEAST_SHARE: Final = 0.25
"""Minimum share of the highest measured rate, for a line whose queue others keep full."""
REFUTED: Final = 1.25
"""Factor above the full line's rate that, without a queue, proves a new or faster line."""
FEWEST_LOOKS, MOST_LOOKS = 2, 8
"""Number of looks at a full line for its rate: packets arrive in bursts, and lines change."""


class OwnLine:
    """Estimator of the line's rate. Call `saw` for all links every LOOK_S while any sends."""

    def __init__(self) -> None:
        self.rate: float | None = None
        """Allowed bytes per second; None: the line was never full."""
        self._carried: deque[float] = deque(maxlen=MOST_LOOKS)
        """Bytes per second while the line was full."""
        self._most = 0.0
        self._links: Mapping[Hashable, Sent] = {}
        """State of the links at the last look."""
        self._looked_at = 0.0
        self._was_full = False

    def saw(self, links: Mapping[Hashable, Sent], now: float) -> None:
        """Record the traffic of all links at `now`."""
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
