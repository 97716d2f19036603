"""How fast one node may speak: so much that none that works ever waits, and little enough to leave time for others.

Two token buckets. Who has used up its burst is read more slowly, by the system's own flow control, and loses nothing.
"""

from __future__ import annotations

from typing import Final

MESSAGES_PER_S: Final = 1_000.0
BYTES_PER_S: Final = 8.0 * 2**20
BURST_S: Final = 10.0
"""After a while of silence, so many seconds' worth at once: what a node has kept while it could not connect."""
_LONGEST_S: Final = 2.0
"""Of one pause: a message of any size is taken at last."""


class Pace:
    """Of one connection. `now` is any clock that only goes forward."""

    def __init__(self, *, now: float) -> None:
        self._messages = MESSAGES_PER_S * BURST_S
        self._bytes = BYTES_PER_S * BURST_S
        self._at = now

    def wait_s(self, num_bytes: int, *, now: float) -> float:
        """How long to read nothing more, after a message of this size; 0 = at all."""
        passed, self._at = now - self._at, now
        self._messages = min(self._messages + passed * MESSAGES_PER_S, MESSAGES_PER_S * BURST_S) - 1
        self._bytes = min(self._bytes + passed * BYTES_PER_S, BYTES_PER_S * BURST_S) - num_bytes
        missing_s = max(-self._messages / MESSAGES_PER_S, -self._bytes / BYTES_PER_S)
        return min(max(missing_s, 0.0), _LONGEST_S)
