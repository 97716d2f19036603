"""How often one address may try a password: a few times at once, then now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

BURST: Final = 5
EVERY_S: Final = 20.0
"""One more attempt after so long."""
MOST_PLACES: Final = 10_000
"""Of more, those are forgotten that tried first."""


class Attempts:
    """A token bucket for each place (what counts as one address). `clock` in seconds, of any origin."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._free_at: dict[str, float] = {}
        """When all attempts of an address will be free again (the generic cell rate algorithm)."""

    def wait_s(self, place: str) -> float:
        """Counts one attempt: 0 when it may be made, else the seconds until one may, and it does not count."""
        now = self._clock()
        free_at = max(self._free_at.pop(place, now), now)
        wait_s = free_at - now - (BURST - 1) * EVERY_S
        self._free_at[place] = free_at if wait_s > 0 else free_at + EVERY_S
        if len(self._free_at) > MOST_PLACES:
            del self._free_at[next(iter(self._free_at))]
        return max(wait_s, 0.0)

    def forget(self, place: str) -> None:
        """This address has shown who it is."""
        self._free_at.pop(place, None)
