"""Nodes that do not work for some tenants: their owners refuse the tenants, or their engines cannot use an adapter."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

VERSIONS: Final = 1_024
"""Largest number of adapters for which the nodes that cannot use them are remembered: the adapters reported last. Set
by hand to bound the memory."""


class UnwillingNodes:
    """Connected nodes that refuse tenants or cannot use a tenant's adapter. Without such nodes, `of` costs nothing."""

    def __init__(self) -> None:
        self._refused: dict[str, frozenset[str] | None] = {}
        """Names of the refused tenants, by node; None = all tenants."""
        self._of: dict[str, tuple[str, ...]] = {}
        """Cached nodes that refuse a tenant, by tenant; cleared when a node with refusals connects or leaves."""
        self._unable: OrderedDict[int, tuple[str, ...]] = OrderedDict()
        """Nodes that cannot use a tenant's adapter, by its version."""

    def connected(self, node_id: str, *, answers: bool, refuses: frozenset[str]) -> None:
        """Note for which tenants a node does not work. `answers` False: for none at all. `refuses`: names of the
        tenants that it refuses."""
        self.disconnected(node_id)
        if refuses or not answers:
            self._refused[node_id] = refuses if answers else None
            self._of.clear()

    def disconnected(self, node_id: str) -> None:
        if node_id in self._refused:
            del self._refused[node_id]
            self._of.clear()
        for version, nodes in list(self._unable.items()):
            if node_id in nodes:  # The node may return with another engine.
                self._unable[version] = tuple(one for one in nodes if one != node_id)

    def cannot_use(self, node_id: str, version: int) -> None:
        """Note that the node's engine cannot use this adapter of a tenant."""
        self._unable[version] = tuple(dict.fromkeys((*self._unable.get(version, ()), node_id)))
        self._unable.move_to_end(version)
        if len(self._unable) > VERSIONS:
            self._unable.popitem(last=False)

    def of(self, tenant: str, version: int = 0) -> tuple[str, ...]:
        """Return the nodes that refuse this tenant, and those whose engines cannot use its adapter `version`. No node
        refuses the run's own work, ""."""
        if not tenant or not (self._refused or self._unable):
            return ()
        if tenant not in self._of:
            self._of[tenant] = tuple(
                node_id for node_id, names in self._refused.items() if names is None or tenant in names
            )
        unable = self._unable.get(version)
        return tuple(dict.fromkeys((*self._of[tenant], *unable))) if unable else self._of[tenant]
