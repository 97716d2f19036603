"""Keys of one address together hold a small part of what strangers may hold: keys cost nothing, addresses do.

A stranger (`strangers`) needs a *place* of its origin to be offered work: an address or a network of addresses; or its
invite, so that all keys of one person share places of their own. It keeps the place until what it was given is back or
past its deadline. Where there is none it waits for the next, first come, first served. An origin that is not known
shares nothing with anybody.
"""

from __future__ import annotations

from typing import Final

from echo_hub.core.nodes.node import Node

ORIGIN_SHARE: Final = 4
"""One origin may have one of so many of the rollouts that strangers may hold; one in any case."""


class Origins:
    """Keeps `Node.has_place` true."""

    def __init__(self) -> None:
        self._num_taken: dict[str, int] = {}
        self._waiting: dict[str, dict[str, None]] = {}

    def enter(self, node: Node, may_hold: int) -> bool:
        """Whether the stranger has a place, or gets one; else it waits. `may_hold`: rollouts, all strangers."""
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
        """It needs its place no more."""
        node.has_place = False
        taken = self._num_taken.pop(node.origin) - 1
        if taken:
            self._num_taken[node.origin] = taken

    def next_waiting(self, origin: str) -> str | None:
        """Who waits for a place of this origin, and does no more from here on; None: nobody."""
        waiting = self._waiting.get(origin)
        if not waiting:
            return None
        node_id = next(iter(waiting))
        del waiting[node_id]
        if not waiting:
            del self._waiting[origin]
        return node_id
