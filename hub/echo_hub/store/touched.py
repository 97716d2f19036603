"""A log of the nodes whose totals have changed. A cache of thousands of nodes reads all nodes once, then only changed
nodes.

The log covers the commits of this process. Other processes (`echo-hub ban`) change few columns of nodes, which the hub
reads separately.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator


class Touched:
    """Thread-safe log of changed nodes.

    The writer calls `note` after its commit. A reader takes `number` before it reads the database. Later,
    `since(number)` returns every node with a change that the read may have missed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, int] = {}
        """Number of each node's latest change. Ordered: the node that changed last comes last."""
        self._number = 0

    @property
    def number(self) -> int:
        """Return the number of `note` calls so far. It serves as the number of the latest change."""
        return self._number

    def note(self, node_ids: Collection[str]) -> None:
        with self._lock:
            self._number += 1
            for node_id in node_ids:
                self._last.pop(node_id, None)
                self._last[node_id] = self._number

    def since(self, number: int) -> frozenset[str]:
        """Return the nodes whose changes have a higher number than `number`. A concurrent `note` may add more nodes."""
        with self._lock:
            return frozenset(self._newer(number))

    def _newer(self, number: int) -> Iterator[str]:
        for node_id, at in reversed(self._last.items()):
            if at <= number:
                return
            yield node_id
