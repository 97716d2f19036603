"""What the pages say of all nodes, read anew as far as it changes: thousands that are away cost a look next to nothing.

Of nodes that are connected, or banned or unbanned since, the books are read for every look. Of the others they are read
the seldomer the longer it takes, and beside those who look: what becomes of their last rollouts is decided when they
have left, and is shown a little later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final

from echo_hub.dashboard.model import Fleet, NodesAway, NodeView
from echo_hub.store.store import Store
from echo_hub.views.beside import ReadBeside
from echo_hub.views.nodes import ConnectedNode, node_view
from echo_shared.books import NodeTotals

MOST_NODES: Final = 10_000
"""That the pages know of, beside those that are connected: fresh keys cost nothing, and the books keep all that ever
came."""
FRESH_S: Final = 0.2
"""So long the same books do for the next look: nodes and leaderboard are asked for one after the other."""


class AllNodes:
    """Safe on several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._books = ReadBeside(self._read_all, every_s=0.0, name="all nodes")
        self._whole: Mapping[str, NodeTotals] = {}
        """All, as they were read last."""
        self._rows: dict[str, NodeTotals] = {}
        """The same, with what was read of some of them since."""
        self._read_since: frozenset[str] = frozenset()
        """These: while the whole was read, or later."""
        self._of: frozenset[str] = frozenset()
        """The nodes that were connected then."""
        self._banned: frozenset[str] = frozenset()
        self._read_at = float("-inf")
        self._away = NodesAway({})

    def fleet(self, connected: Mapping[str, ConnectedNode], leased: Mapping[str, int]) -> Fleet:
        """`leased`: rollouts leased to each and not yet received."""
        with self._lock:
            changed = self._read_changes(frozenset(connected))
            now, here = time.time(), dict[str, NodeView]()
            for node_id in dict.fromkeys((*connected, *leased)):
                if (row := self._rows.get(node_id)) is not None:
                    said = connected.get(node_id)
                    row = row if said is None else replace(row, last_seen=now)
                    here[node_id] = node_view(row, said, in_flight=leased.get(node_id, 0))
            self._let_go(changed, here)
            return Fleet(here=here, away=self._away)

    def _let_go(self, changed: Collection[str], here: Mapping[str, NodeView]) -> None:
        """Makes those that are away anew, if that is not what it was."""
        before = self._away.by_id
        is_another = len(before) + len(here) != len(self._rows) or any(node_id in before for node_id in here)
        if is_another or any(node_id not in here for node_id in changed):
            self._away = NodesAway(
                {
                    node_id: known
                    if (known := before.get(node_id)) is not None and known.totals is row
                    else node_view(row, None, in_flight=0)
                    for node_id, row in self._rows.items()
                    if node_id not in here
                }
            )

    def _read_changes(self, connected: frozenset[str]) -> Collection[str]:
        """Reads what is to be read for this look; the nodes of which something may be another."""
        if time.monotonic() - self._read_at < FRESH_S and connected == self._of and not self._books.is_quick:
            return ()
        banned, whole = self._store.banned_nodes(), self._books.newest(connected)
        # Those that have left a moment ago too: what they did last is committed by now.
        wanted = changed = connected | self._of | (banned ^ self._banned)
        is_new = whole is not self._whole
        if is_new:
            self._rows, wanted, self._read_since = dict(whole), wanted | self._read_since, wanted
        if not (is_new and self._books.is_quick):
            self._rows |= self._read(wanted)
            self._read_since |= wanted
        self._whole, self._banned, self._of, self._read_at = whole, banned, connected, time.monotonic()
        return self._rows if is_new else changed

    def _read_all(self, connected: frozenset[str]) -> Mapping[str, NodeTotals]:
        return {row.node_id: row for row in self._store.leaderboard(most=MOST_NODES, always=connected)}

    def _read(self, wanted: Collection[str]) -> Mapping[str, NodeTotals]:
        return {row.node_id: row for row in self._store.leaderboard(only=wanted)}
