"""Views of all nodes. Only changed nodes are read again, so a page of thousands of nodes costs very little.

A background thread reads all nodes from the database. The longer a reading takes, the rarer it is. In between, each
page reads only changed nodes: nodes that connected, left, were banned or unbanned, hold another number of rollouts, or
were written by the hub in the meantime (`echo_hub.store.touched`). A view is rebuilt only after changes of the node's
record or of the node's own report.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from echo_hub.dashboard.model import FleetView, NodesAway, NodeView
from echo_hub.store.known_nodes import read_banned_nodes
from echo_hub.store.reports import read_leaderboard, read_under_way
from echo_hub.store.store import Store
from echo_hub.views.beside import ReadBeside
from echo_shared.records.run import LiveNode, NodeTotals

MOST_NODES: Final = 10_000
"""Largest number of nodes that the pages know in addition to the connected ones. The database keeps every node ever
seen, and anyone can make any number of node keys.
"""
FRESH_S: Final = 0.2
"""Seconds for which a partial reading is reused, because pages request nodes and leaderboard one after the other."""


_AWAY: Final = LiveNode(activity="")

SEEN_S: Final = 15.0
"""Seconds after which the hub makes a connected node's row on the page again, with "last seen" set to now. Each node's
own interval lies between this value and almost twice this value, which spreads the work over time.
"""


@dataclass(frozen=True, slots=True)
class _Whole:
    """Result of a full reading: the records of all nodes, including every change numbered up to `touched`."""

    rows: Mapping[str, NodeTotals]
    touched: int


@dataclass(frozen=True, slots=True)
class _Made:
    view: NodeView
    row: NodeTotals
    said: tuple[int, LiveNode | None]
    good_until: float


class AllNodes:
    """Keeps the pages' views of all nodes up to date. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._books = ReadBeside(self._read_all, every_s=0.0, name="all nodes")
        self._whole = _Whole({}, 0)
        self._rows: dict[str, NodeTotals] = {}
        """Result of the last full reading. Later partial readings have replaced changed nodes in it."""
        self._touched = 0
        """Number of the newest change in the store's log of changed nodes (`Touched`) that `_rows` includes."""
        self._under_way: Mapping[str, int] = {}
        self._of: frozenset[str] = frozenset()
        """The nodes that were connected when the rows were last read."""
        self._read_at = float("-inf")
        self._here: Mapping[str, _Made] = {}
        self._away = NodesAway({})

    def fleet(self, connected: Mapping[str, LiveNode], leased: Mapping[str, int], *, touched: int) -> FleetView:
        """Return the views of all nodes.

        `leased` counts, for each node, the leased rollouts that are not received yet. `touched` is `Touched.number`,
        taken before this call.
        """
        with self._lock:
            changed = self._read_changes(frozenset(connected), touched)
            now, made = time.time(), dict[str, _Made]()
            for node_id in dict.fromkeys((*connected, *leased)):
                if (row := self._rows.get(node_id)) is not None:
                    made[node_id] = self._made(row, connected.get(node_id), leased.get(node_id, 0), now)
            self._here = made
            here = {node_id: one.view for node_id, one in made.items()}
            self._let_go(changed, here)
            return FleetView(here=here, away=self._away)

    def _made(self, row: NodeTotals, node: LiveNode | None, held: int, now: float) -> _Made:
        said = (held, node)
        known = self._here.get(row.node_id)
        if known is not None and known.row is row and known.said == said and now < known.good_until:
            return known
        # Let views expire at different times, by node id, so that views built together are not all rebuilt together.
        lasts_s = SEEN_S * (1 + hash(row.node_id) % 8 / 8) if node is not None else float("inf")
        shown = row if node is None else replace(row, last_seen=now)
        return _Made(node_view(shown, node, in_flight=held), row, said, now + lasts_s)

    def _let_go(self, changed: Collection[str], here: Mapping[str, NodeView]) -> None:
        """Rebuild the views of all disconnected nodes without leased rollouts, if the set of such nodes or one of their
        records has changed."""
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

    def _read_changes(self, connected: frozenset[str], touched: int) -> Collection[str]:
        """Read the nodes that have changed since the last reading, and return their ids."""
        if time.monotonic() - self._read_at < FRESH_S and connected == self._of and not self._books.is_quick:
            return ()
        banned, under_way, whole = (
            self._store.read(read_banned_nodes),
            self._store.read(read_under_way),
            self._books.newest(connected, touched),
        )
        is_new = whole is not self._whole
        if is_new:
            self._rows, self._touched = dict(whole.rows), min(whole.touched, touched)
        changed = set(self._store.touched.since(self._touched))
        if is_new:
            changed |= connected - self._rows.keys()
        else:
            changed |= (connected ^ self._of) | _others(self._under_way, under_way)
        known = self._rows.keys() | connected | self._of
        changed = (changed & known) | self._wrongly(banned)
        if changed:
            self._rows |= {row.node_id: row for row in self._store.read(read_leaderboard, only=changed)}
        self._whole, self._under_way, self._of, self._touched = whole, under_way, connected, touched
        self._read_at = time.monotonic()
        return self._rows if is_new else changed

    def _wrongly(self, banned: Collection[str]) -> set[str]:
        """Return the nodes whose ban in `_rows` differs from the database, because another process has changed it."""
        shown = {node_id for node_id, row in self._rows.items() if row.banned_at is not None}
        return (shown ^ set(banned)) & self._rows.keys()

    def _read_all(self, connected: frozenset[str], touched: int) -> _Whole:
        rows = self._store.read(read_leaderboard, most=MOST_NODES, always=connected)
        return _Whole({row.node_id: row for row in rows}, touched)


def _others(before: Mapping[str, int], now: Mapping[str, int]) -> set[str]:
    """Return the keys whose values differ, and the keys that exist in only one of the two."""
    return {key for key, _ in before.items() ^ now.items()}


def node_view(totals: NodeTotals, node: LiveNode | None, *, in_flight: int) -> NodeView:
    """Return the view of one node; `node` is None if it is disconnected."""
    live = node or _AWAY
    return NodeView(
        totals=totals,
        connected=node is not None,
        activity=live.activity,
        policy_version=live.policy_version,
        capacity=live.capacity,
        in_flight=in_flight,
        tokens_per_s=live.tokens_per_s,
        precision=live.precision or totals.precision,
        costs_per_hour=live.cost_per_hour,
        standby=live.standby,
        num_links=live.num_links,
        num_punched=live.num_punched,
    )
