"""How fast a node's own line to the internet is, learnt from what its links carry, and how fast they may send on it.

    .50 s   all links wait in a queue
    .75 s   all still do, and 300 kB have arrived since
    1.00 s  the same again: the line carries 1.2 MB a second, and 1.04 may be sent from now on
    1.25 s  no queue: 1.06 may be sent, and so on until there is one again

Links share nothing but their node's line, so when all of several have a queue on their way, it is before that line: in
the router of its owner, whose calls and games wait behind it. TCP fills that queue whenever it can. To send a little
less than the line carries leaves it short, as LEDBAT does (RFC 6817), and loses no packets to it; where LEDBAT yields
on each connection by itself, this is for all links of a node together. A line that became faster is found by sending a
little more at every look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from statistics import fmean
from typing import Final

from echo_shared.sent import Sent

FEWEST_LINKS: Final = 2
"""That send: the queue of one alone may be before the other end, which could slow its node down by answering late."""
LOOK_S: Final = 0.25
"""Between two looks; of a line of 10 Mbit/s that is 200 packets."""
SHARE: Final = 0.87
"""Of what the line has carried for the links: what comes is confirmed over it as well, and packets have headers."""
GROWTH: Final = 1.02
"""From look to look, while no queue is seen and most of what may be sent is."""
USED_SHARE: Final = 0.7
"""Of what may be sent: who sends less does not find out whether more would do."""
LEAST_SHARE: Final = 0.25
"""Of the most that the line has carried: what is left to the run where others keep the queue filled."""
REFUTED: Final = 1.25
"""Times what it carried when full, and still no queue: it is another line, or has become faster."""
FEWEST_LOOKS, MOST_LOOKS = 2, 8
"""At a full line, over which its rate is taken: packets arrive in bursts, and lines change."""


class OwnLine:
    """Tell it of all links every LOOK_S while any sends."""

    def __init__(self) -> None:
        self.rate: float | None = None
        """Bytes a second that may be sent; None: the line has never been full."""
        self._carried: deque[float] = deque(maxlen=MOST_LOOKS)
        """Bytes a second, while it was full."""
        self._most = 0.0
        self._links: Mapping[Hashable, Sent] = {}
        """As last seen, by any name."""
        self._looked_at = 0.0
        self._was_full = False

    def saw(self, links: Mapping[Hashable, Sent], now: float) -> None:
        """What all links have sent by `now`."""
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
