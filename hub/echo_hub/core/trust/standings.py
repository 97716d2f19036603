"""Standings of all nodes.

The standing of a node that was ever checked is kept forever. Keys cost nothing, so the standing of an unchecked node is
kept only while the node is connected, and for the `REMEMBERED` unchecked nodes that left last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from echo_hub.core.trust.numerics import NOT_SAID, Numerics, NumericsClass
from echo_hub.core.trust.standing import Standing, StandingRow

REMEMBERED: Final = 65_536
"""Number of departed unchecked nodes whose standings are kept, because their rollouts may still be under check."""


class Standings:
    """Trust standings by node id. `numerics`: the known classes of engines."""

    def __init__(self, numerics: Numerics) -> None:
        self._numerics = numerics
        self._standings: dict[str, Standing] = {}
        self._left: OrderedDict[str, None] = OrderedDict()
        """Nodes that left before any check, the longest ago first."""

    def __len__(self) -> int:
        return len(self._standings)

    def restore(self, row: StandingRow) -> Standing:
        """Take over a standing from before a restart."""
        standing = self._standings[row.node_id] = Standing.of(row)
        standing.numerics = self._numerics.known(row.numerics)
        return standing

    def get(self, node_id: str) -> Standing | None:
        return self._standings.get(node_id)

    def of_class(self, numerics: NumericsClass) -> list[Standing]:
        """Return the standings of all nodes of a class. O(nodes); called seldom."""
        return [standing for standing in self._standings.values() if standing.numerics == numerics]

    def of(self, node_id: str) -> Standing:
        """Return a node's standing; an unknown node gets a new one."""
        standing = self._standings.get(node_id)
        if standing is None:
            standing = self._standings[node_id] = Standing(node_id, numerics=self._numerics.known(NOT_SAID))
        return standing

    def connected(self, node_id: str, kin: Iterable[str]) -> Standing:
        """Note that a node has connected. `kin`: see `Standing`."""
        self._left.pop(node_id, None)
        standing = self.of(node_id)
        standing.kin = frozenset(filter(None, kin))
        return standing

    def disconnected(self, node_id: str) -> None:
        """Note that a node has left. It may come back."""
        standing = self._standings.get(node_id)
        if standing is not None and not standing.has_shown_anything:
            self._left[node_id] = None
            if len(self._left) > REMEMBERED:
                oldest, _ = self._left.popitem(last=False)
                if not self._standings[oldest].has_shown_anything:
                    del self._standings[oldest]
