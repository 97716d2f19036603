"""What the pages say of all nodes, read anew as far as it changes: thousands of them cost a look next to nothing.

All are read the seldomer the longer that takes, and beside those who look. For every look the books are read of those
nodes that came or left, were banned or unbanned, hold another number of rollouts, or of which the hub has written
anything since (`echo_hub.store.touched`); a view is made anew where its node's books or its own words are others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from echo_hub.dashboard.model import Fleet, NodesAway, NodeView
from echo_hub.store.known_nodes import read_banned_nodes
from echo_hub.store.reports import read_leaderboard, read_under_way
from echo_hub.store.store import Store
from echo_hub.views.beside import ReadBeside
from echo_hub.views.nodes import ConnectedNode, node_view
from echo_shared.books import NodeTotals

MOST_NODES: Final = 10_000
"""That the pages know of, beside those that are connected: fresh keys cost nothing, and the books keep all that ever
came."""
FRESH_S: Final = 0.2
"""So long the same books do for the next look: nodes and leaderboard are asked for one after the other."""


SEEN_S: Final = 15.0
"""A connected node is shown as seen no longer ago than twice this: then its view is made anew, whatever has changed."""


@dataclass(frozen=True, slots=True)
class _Whole:
    """All nodes, with everything that was noted as touched by then."""

    rows: Mapping[str, NodeTotals]
    touched: int


@dataclass(frozen=True, slots=True)
class _Made:
    """A view, and what it was made of."""

    view: NodeView
    row: NodeTotals
    said: tuple[object, ...]
    good_until: float


class AllNodes:
    """Safe on several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._books = ReadBeside(self._read_all, every_s=0.0, name="all nodes")
        self._whole = _Whole({}, 0)
        """As they were read last."""
        self._rows: dict[str, NodeTotals] = {}
        """The same, with what was read of some of them since."""
        self._touched = 0
        """All that was noted up to then is in them."""
        self._under_way: Mapping[str, int] = {}
        self._of: frozenset[str] = frozenset()
        """The nodes that were connected then."""
        self._read_at = float("-inf")
        self._here: Mapping[str, _Made] = {}
        self._away = NodesAway({})

    def fleet(self, connected: Mapping[str, ConnectedNode], leased: Mapping[str, int], *, touched: int) -> Fleet:
        """`leased`: rollouts leased to each and not yet received. `touched`: `Touched.number`, asked for before
        anything was read for this look."""
        with self._lock:
            changed = self._read_changes(frozenset(connected), touched)
            now, made = time.time(), dict[str, _Made]()
            for node_id in dict.fromkeys((*connected, *leased)):
                if (row := self._rows.get(node_id)) is not None:
                    made[node_id] = self._made(row, connected.get(node_id), leased.get(node_id, 0), now)
            self._here = made
            here = {node_id: one.view for node_id, one in made.items()}
            self._let_go(changed, here)
            return Fleet(here=here, away=self._away)

    def _made(self, row: NodeTotals, node: ConnectedNode | None, held: int, now: float) -> _Made:
        """As it was, if it was made of the same."""
        said = (held, *_words(node)) if node is not None else (held,)
        known = self._here.get(row.node_id)
        if known is not None and known.row is row and known.said == said and now < known.good_until:
            return known
        # They were made together perhaps, and are not to be made again together.
        lasts_s = SEEN_S * (1 + hash(row.node_id) % 8 / 8) if node is not None else float("inf")
        shown = row if node is None else replace(row, last_seen=now)
        return _Made(node_view(shown, node, in_flight=held), row, said, now + lasts_s)

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

    def _read_changes(self, connected: frozenset[str], touched: int) -> Collection[str]:
        """Reads what is to be read for this look; the nodes of which something may be another."""
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
        """Those that are shown as banned and are not, or the other way round: another process may have written it."""
        shown = {node_id for node_id, row in self._rows.items() if row.banned_at is not None}
        return (shown ^ set(banned)) & self._rows.keys()

    def _read_all(self, connected: frozenset[str], touched: int) -> _Whole:
        rows = self._store.read(read_leaderboard, most=MOST_NODES, always=connected)
        return _Whole({row.node_id: row for row in rows}, touched)


def _words(node: ConnectedNode) -> tuple[object, ...]:
    """All that a view shows of what a node says, and was told."""
    return (
        node.activity,
        node.capacity,
        node.policy_version,
        node.tokens_per_s,
        node.precision,
        node.cost_per_hour,
        node.standby,
    )


def _others(before: Mapping[str, int], now: Mapping[str, int]) -> set[str]:
    """Keys of which the number is another."""
    return {key for key, _ in before.items() ^ now.items()}
