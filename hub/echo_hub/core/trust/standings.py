"""All nodes' standings.

Of a node that was checked it is kept for ever. A key costs nothing to make, so of one that has shown nothing yet it is
kept as long as the node is connected, and of the `REMEMBERED` that left last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from echo_hub.core.trust.numerics import NOT_SAID, Numerics, NumericsClass
from echo_hub.core.trust.standing import Standing, StandingRow

REMEMBERED: Final = 65_536
"""A rollout on its way, or under check, is judged by what its node said of its engine."""


class Standings:
    """`numerics`: where the classes of numerics are known."""

    def __init__(self, numerics: Numerics) -> None:
        self._numerics = numerics
        self._standings: dict[str, Standing] = {}
        self._left: OrderedDict[str, None] = OrderedDict()
        """Nodes that were not checked yet when they left; the longest ago is the first."""

    def __len__(self) -> int:
        return len(self._standings)

    def restore(self, row: StandingRow) -> Standing:
        """From before a restart."""
        standing = self._standings[row.node_id] = Standing.of(row)
        standing.numerics = self._numerics.known(row.numerics)
        return standing

    def get(self, node_id: str) -> Standing | None:
        return self._standings.get(node_id)

    def of_class(self, numerics: NumericsClass) -> list[Standing]:
        """Those of all nodes of a class. O(nodes), for what seldom happens."""
        return [standing for standing in self._standings.values() if standing.numerics == numerics]

    def of(self, node_id: str) -> Standing:
        """That of a node that is not known begins here."""
        standing = self._standings.get(node_id)
        if standing is None:
            standing = self._standings[node_id] = Standing(node_id, numerics=self._numerics.known(NOT_SAID))
        return standing

    def connected(self, node_id: str, kin: Iterable[str]) -> Standing:
        """`kin`: see `Standing`."""
        self._left.pop(node_id, None)
        standing = self.of(node_id)
        standing.kin = frozenset(filter(None, kin))
        return standing

    def disconnected(self, node_id: str) -> None:
        """It may come back."""
        standing = self._standings.get(node_id)
        if standing is not None and not standing.has_shown_anything:
            self._left[node_id] = None
            if len(self._left) > REMEMBERED:
                oldest, _ = self._left.popitem(last=False)
                if not self._standings[oldest].has_shown_anything:
                    del self._standings[oldest]
