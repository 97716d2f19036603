"""Limit the attempts with wrong secrets from one address: first a burst of attempts, then one every `EVERY_S`
seconds."""

from __future__ import annotations

from typing import Final

BURST: Final = 5
EVERY_S: Final = 20.0
"""Seconds after which an address gains one more attempt."""
MOST_PLACES: Final = 10_000
"""Largest number of addresses that are remembered. Beyond this number, the address with the oldest last attempt is
forgotten."""


class Attempts:
    def __init__(self) -> None:
        self._free_at: dict[str, float] = {}
        """For each address: the time at which its full burst is available again, as in the generic cell rate
        algorithm."""

    def wait_s(self, place: str, now: float) -> float:
        """Count one attempt and return 0 if it is allowed.

        Otherwise return the seconds to wait, without counting the attempt.
        """
        free_at = max(self._free_at.pop(place, now), now)
        wait_s = free_at - now - (BURST - 1) * EVERY_S
        self._free_at[place] = free_at if wait_s > 0 else free_at + EVERY_S
        if len(self._free_at) > MOST_PLACES:
            del self._free_at[next(iter(self._free_at))]
        return max(wait_s, 0.0)

    def forget(self, place: str) -> None:
        """Give an address its full burst of attempts again, after a successful login."""
        self._free_at.pop(place, None)
