"""Refuse a joining node whose name looks like the name of an older node whose work has counted.

A key costs nothing, so a name belongs to a node only once that node's work has counted. Nodes of one invite may share
names, and so may the operator's nodes on the hub's host.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from echo_hub.net.client_address import origin_of
from echo_hub.net.gateway import NodeInfo
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.known_nodes import read_counted_names
from echo_shared.errors import RefusedError
from echo_shared.records.run import CountedName
from echo_shared.wire.messages import RefusalCode
from echo_shared.wire.messages.shown_names import looks_of

LOOK_S: Final = 30.0
"""Interval in seconds between two readings of the names from the database."""


class KnownNodes:
    """Checks names of nodes, and records nodes in the store."""

    def __init__(self, store: AsyncStore) -> None:
        self._store = store
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()
        self._first: dict[str, CountedName] = {}
        """The oldest node for each skeleton of a name (`looks_of`). Two names look alike if they have the same
        skeleton."""

    async def check_name(self, node: NodeInfo) -> None:
        """Raise RefusedError if the node's name looks like that of an older node."""
        if not origin_of(node.host):
            return
        async with self._reading:  # Nodes that join meanwhile wait, and are checked against the same names.
            if time.monotonic() - self._read_at >= LOOK_S:
                # Use a thread: 100,000 names take half a second.
                self._first = await asyncio.to_thread(_by_look, await self._store.read(read_counted_names))
                self._read_at = time.monotonic()
        for look in looks_of(node.name):
            first = self._first.get(look)
            if first is None or first.node_id == node.node_id:
                continue
            if node.invite_id is None or node.invite_id != first.invite_id:
                raise RefusedError(
                    "The node's name looks like that of another node, which had it first.",
                    got=f"{node.name}, like {first.name} ({first.node_id[:10]})",
                    do="Give yours another, by --name NAME or echo-node config set name NAME, and start it again. All"
                    " that has counted for it stays with its key.",
                    code=RefusalCode.NAME_TAKEN,
                )

    async def remember(self, node: NodeInfo) -> None:
        await self._store.on_writer(
            self._store.store.node_seen,
            node_id=node.node_id,
            public_key=node.public_key,
            name=node.name,
            backend=node.backend,
            device=node.device,
            cost_per_hour=node.cost_per_hour,
            power_watts=node.power_watts,
            invite_id=node.invite_id,
            owner_key=node.owner_key,
            owner_claim=node.owner_claim,
            now=time.time(),
        )


def _by_look(nodes: Sequence[CountedName]) -> dict[str, CountedName]:
    return {look: node for node in reversed(nodes) for look in looks_of(node.name)}
