"""Limit the rate of an event (a connection, a request) by token buckets: a common bucket and one bucket per address.

At most `MOST_PLACES` addresses are remembered; a forgotten address starts with a full bucket. The common bucket limits
clients with even more addresses.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

BURST_S: Final = 4.0
"""Capacity of a token bucket: the tokens that its rate adds in this many seconds."""
MOST_PLACES: Final = 16_384


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float

    def fill(self, per_s: float, now: float) -> float:
        self.left = min(self.left + max(now - self.at, 0.0) * per_s, per_s * BURST_S)
        self.at = now
        return self.left


class AddressRate:
    """Token buckets for one kind of event: one for all addresses together and one for each address. `in_all` and
    `of_one` are their rates, in events per second. `now` is a monotonic clock in seconds; all calls must use the same
    clock. A `place` is an address as `place_of` returns it.
    """

    def __init__(self, *, in_all: float, of_one: float, now: float) -> None:
        self._in_all = in_all
        self._of_one = of_one
        self._all = _Bucket(in_all * BURST_S, now)
        self._places: OrderedDict[str, _Bucket] = OrderedDict()
        """Token buckets by address; the address that was used last comes last."""

    def take(self, place: str, *, now: float) -> bool:
        """Take one token for this address and return True, or return False if its bucket or the common one is empty.

        A refused event takes no token from either bucket.
        """
        bucket = self._places.pop(place, None) or _Bucket(self._of_one * BURST_S, now)
        self._places[place] = bucket
        if len(self._places) > MOST_PLACES:
            self._places.popitem(last=False)
        if bucket.fill(self._of_one, now) < 1 or self._all.fill(self._in_all, now) < 1:
            return False
        bucket.left -= 1
        self._all.left -= 1
        return True

    def give_back(self, place: str) -> None:
        """Put one token that was taken for this address back into both buckets."""
        self._all.left += 1
        if place in self._places:
            self._places[place].left += 1
