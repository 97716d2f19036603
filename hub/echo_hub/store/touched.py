"""Nodes whose totals have changed, for caches of thousands of nodes: after the first read, only changed nodes are read.

Covers the commits of this process. Other processes (`echo-hub ban`) change few columns of nodes, which the hub reads
separately.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator


class Touched:
    """Thread-safe log of changed nodes.

    Call `note` after the commit. A reader that takes `number` before it reads the database then misses no change with a
    higher number.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, int] = {}
        """Number of each node's latest change, newest last."""
        self._number = 0

    @property
    def number(self) -> int:
        """Number of `note` calls so far."""
        return self._number

    def note(self, node_ids: Collection[str]) -> None:
        with self._lock:
            self._number += 1
            for node_id in node_ids:
                self._last.pop(node_id, None)
                self._last[node_id] = self._number

    def since(self, number: int) -> frozenset[str]:
        """Return the nodes noted after `number`. A concurrent `note` may add more."""
        with self._lock:
            return frozenset(self._newer(number))

    def _newer(self, number: int) -> Iterator[str]:
        for node_id, at in reversed(self._last.items()):
            if at <= number:
                return
            yield node_id
