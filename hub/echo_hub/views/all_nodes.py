"""What the pages say of all nodes, read anew as far as it changes: thousands that are away cost a look next to nothing.

Of nodes that are connected, or banned or unbanned since, the books are read for every look. Of the others they are read
the seldomer the longer it takes: what becomes of their last rollouts is decided when they have left, and is shown a
little later. What a look shows of a node of whom nothing has changed is the same object as before.
"""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections.abc import Mapping, Sequence
from typing import Final

from echo_hub.dashboard.model import NodeView
from echo_hub.store.store import Store
from echo_hub.views.nodes import ConnectedNode, node_view, seen_now
from echo_shared.books import NodeTotals

MOST_NODES: Final = 10_000
"""That the pages know of, beside those that are connected: fresh keys cost nothing, and the books keep all that ever
came."""
QUICK_S: Final = 0.02
"""Books that are read within it are read for every look."""
REST: Final = 200.0
"""Times what it took to read them, until those of all nodes are read again."""
FRESH_S: Final = 0.2
"""So long the same books do for the next look: nodes and leaderboard are asked for one after the other."""


class AllNodes:
    """Safe on several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._all: list[NodeTotals] = []
        self._of: frozenset[str] = frozenset()
        """The nodes that were connected then."""
        self._banned: frozenset[str] = frozenset()
        self._read_at = self._all_read_at = float("-inf")
        self._all_took_s = 0.0
        self._views: dict[str, NodeView] = {}

    def views(self, connected: Mapping[str, ConnectedNode], leased: Mapping[str, int]) -> tuple[NodeView, ...]:
        """`leased`: rollouts leased to each and not yet received."""
        with self._lock:
            views: dict[str, NodeView] = {}
            for row in self._totals(frozenset(connected)):
                node_id = row.node_id
                known = self._views.get(node_id)
                if (
                    known is None
                    or known.totals is not row
                    or node_id in connected
                    or node_id in leased
                    or known.in_flight
                ):
                    known = node_view(row, connected.get(node_id), in_flight=leased.get(node_id, 0))
                views[node_id] = known
            self._views = views
            return tuple(views.values())

    def _totals(self, connected: frozenset[str]) -> Sequence[NodeTotals]:
        """In the order of their shares."""
        now = time.monotonic()
        if now - self._read_at < FRESH_S and connected == self._of and self._all_took_s > QUICK_S:
            return self._all
        banned = self._store.banned_nodes()
        known = {row.node_id for row in self._all} if connected - self._of else self._of
        if now - self._all_read_at >= REST * self._all_took_s or self._all_took_s <= QUICK_S or not connected <= known:
            self._all = self._store.leaderboard(most=MOST_NODES, always=connected)
            self._all_read_at = now
            self._all_took_s = time.monotonic() - now
        else:
            # Those that have left a moment ago too: what they did last is committed by now.
            wanted = connected | self._of | (banned ^ self._banned)
            anew = {row.node_id: row for row in self._store.leaderboard(only=wanted)}
            listed = [row.node_id for row in self._all if row.node_id in anew]
            self._all = [row for row in self._all if row.node_id not in anew]
            for node_id in listed:
                insort(self._all, anew[node_id], key=_place)
        self._all = seen_now(self._all, connected, time.time())
        self._banned = banned
        self._of, self._read_at = connected, time.monotonic()
        return self._all


def _place(row: NodeTotals) -> tuple[float, str, str]:
    """As the books have them in order."""
    return -row.share, row.name, row.node_id
