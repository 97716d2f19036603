"""Which nodes' totals have changed, for whoever keeps them in memory: thousands of nodes are read once, and then those
of which something is another.

Of what this process has committed. What other processes write of nodes (`echo-hub ban`) is small, and looked for.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator


class Touched:
    """Safe on several threads. `note` follows the commit: who has read a number before it reads the books misses
    nothing that is noted above it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, int] = {}
        """When each was touched last, the newest at the end."""
        self._number = 0

    @property
    def number(self) -> int:
        """How often anything was noted."""
        return self._number

    def note(self, node_ids: Collection[str]) -> None:
        with self._lock:
            self._number += 1
            for node_id in node_ids:
                self._last.pop(node_id, None)
                self._last[node_id] = self._number

    def since(self, number: int) -> frozenset[str]:
        """Those that were touched after what `number` was then; more may be said of others at the same time."""
        with self._lock:
            return frozenset(self._newer(number))

    def _newer(self, number: int) -> Iterator[str]:
        for node_id, at in reversed(self._last.items()):
            if at <= number:
                return
            yield node_id
