"""Fair turns by used time.

Each key has a clock that counts the seconds of its turns. Of the keys with work, the key with the lowest clock gets the
next turn. Idle time is not saved up: a key that returns with new work starts at least at the lowest clock of the busy
keys. So two busy keys get half of the time each, even if one of them has longer turns. A key with little work waits at
most one turn of each competitor.

Source: start-time fair queueing (Goyal et al., SIGCOMM 1996), with one weight for all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class FairTurns(Generic[K]):
    """Chooses the key that gets the next turn, by one clock for each key. Call `next` for the key, then report the
    turn's duration by `spent`."""

    def __init__(self) -> None:
        self._clocks: dict[K, float] = {}
        self._ready: set[K] = set()
        self._now = 0.0
        """Lowest clock, in seconds of used time, of the keys that had work at the last turn."""

    def next(self, ready: Sequence[K]) -> K:
        """Return the next key of `ready`, the keys with work. If clocks are equal, return the first key."""
        had = [self._clocks[key] for key in ready if key in self._ready]
        self._now = max(self._now, min(had, default=self._now))
        for key in ready:
            if key not in self._ready:
                self._clocks[key] = max(self._clocks.get(key, 0.0), self._now)
        self._ready = set(ready)
        return min(ready, key=lambda key: self._clocks[key])

    def spent(self, key: K, seconds: float) -> None:
        self._clocks[key] += seconds

    def forget(self, key: K) -> None:
        """Drop a key that will have no more work."""
        self._clocks.pop(key, None)
        self._ready.discard(key)
