"""How often something may happen: token buckets, one for all addresses together and one for each.

An address that has long been quiet is forgotten, which is to say that its bucket is full. No more than `MOST_PLACES`
are remembered; whoever has more addresses than that meets the limit for all.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

BURST_S: Final = 4.0
"""After a while of silence, so many seconds' worth at once."""
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
    """`now` is any clock that only goes forward, in seconds, the same in every call."""

    def __init__(self, *, in_all: float, of_one: float, now: float) -> None:
        self._in_all = in_all
        self._of_one = of_one
        self._all = _Bucket(in_all * BURST_S, now)
        self._places: OrderedDict[str, _Bucket] = OrderedDict()
        """Those that were heard of last come last."""

    def take(self, place: str, *, now: float) -> bool:
        """Whether it may happen once more. What is refused to one address takes nothing from the others."""
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
        """What was taken last for this address does not count."""
        self._all.left += 1
        if place in self._places:
            self._places[place].left += 1
