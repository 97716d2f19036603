"""Limit per origin on the rollouts that strangers (nodes without any scored rollout) hold: keys cost nothing, but
addresses do.

A stranger needs one of its origin's *places* before it is offered work. An origin is an address, an address range, or
an invite, so that all keys of one person share the same places. The stranger keeps its place until its work is back or
overdue. If no place is free, strangers wait first come, first served. Nodes of unknown origin need no place.
"""

from __future__ import annotations

from typing import Final

from echo_hub.core.nodes.node import Node

ORIGIN_SHARE: Final = 4
"""Divisor that gives one origin's places: a quarter of the strangers' limit (`may_hold`), minimum one."""


class Origins:
    """Counts the taken places of each origin and maintains `Node.has_place`."""

    def __init__(self) -> None:
        self._num_taken: dict[str, int] = {}
        self._waiting: dict[str, dict[str, None]] = {}

    def enter(self, node: Node, may_hold: int) -> bool:
        """Return True if the stranger has or gets a place of its origin. Otherwise it waits in its origin's queue.
        `may_hold`: number of rollouts that all strangers together may hold."""
        if node.has_place or not node.origin:
            return True
        taken = self._num_taken.get(node.origin, 0)
        if taken >= max(1, may_hold // ORIGIN_SHARE):
            self._waiting.setdefault(node.origin, {})[node.node_id] = None
            return False
        self._num_taken[node.origin] = taken + 1
        node.has_place = True
        return True

    def leave(self, node: Node) -> None:
        """Free the place of its origin that the node uses."""
        node.has_place = False
        taken = self._num_taken.pop(node.origin) - 1
        if taken:
            self._num_taken[node.origin] = taken

    def next_waiting(self, origin: str) -> str | None:
        """Remove and return the next node that waits for a place of this origin; None: no node waits."""
        waiting = self._waiting.get(origin)
        if not waiting:
            return None
        node_id = next(iter(waiting))
        del waiting[node_id]
        if not waiting:
            del self._waiting[origin]
        return node_id
