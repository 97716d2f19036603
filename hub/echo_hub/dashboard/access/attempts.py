"""Rate limit for password attempts from one address: a burst, then one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

BURST: Final = 5
EVERY_S: Final = 20.0
"""Seconds until one more attempt is allowed."""
MOST_PLACES: Final = 10_000
"""Addresses remembered; beyond it, the address with the oldest last attempt is forgotten."""


class Attempts:
    """A token bucket for each place, the key that counts as one address. `clock` returns seconds from any origin."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._free_at: dict[str, float] = {}
        """Time at which each address has its full burst again (the generic cell rate algorithm)."""

    def wait_s(self, place: str) -> float:
        """Count one attempt and return 0 if it is allowed.

        Otherwise return the seconds to wait, without counting it.
        """
        now = self._clock()
        free_at = max(self._free_at.pop(place, now), now)
        wait_s = free_at - now - (BURST - 1) * EVERY_S
        self._free_at[place] = free_at if wait_s > 0 else free_at + EVERY_S
        if len(self._free_at) > MOST_PLACES:
            del self._free_at[next(iter(self._free_at))]
        return max(wait_s, 0.0)

    def forget(self, place: str) -> None:
        """Reset the limit of an address after a successful login."""
        self._free_at.pop(place, None)
