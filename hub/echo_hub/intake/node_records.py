"""A node's own records, which the node may read over HTTP: receipts, certificate of contribution, and team."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from echo_hub.driving.resources import Resources
from echo_hub.store.node_records import read_contribution
from echo_hub.store.reading import read_receipts
from echo_hub.store.store import Store
from echo_hub.store.teams import change_team, read_own_team
from echo_shared.records.contribution import sign
from echo_shared.wire.messages import Receipt, Team, TeamWanted


class NodeRecords:
    """Reads and changes the records of single nodes in the store."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._store = resources.store

    async def receipts(self, node_id: str, rollout_ids: Sequence[str]) -> Sequence[Receipt]:
        return await self._store.read_counted(read_receipts, node_id, rollout_ids)

    async def certificate(self, node_id: str) -> bytes | None:
        """Return the node's contribution, signed by the hub; None if the node has never joined."""
        found = await self._store.read_counted(
            read_contribution,
            node_id,
            run_id=self._resources.run_id,
            run_name=self._resources.config.run.name,
            hub_key=self._resources.me.public_key,
            now=time.time(),
        )
        return None if found is None else sign(found, self._resources.me)

    async def change_team(self, node_id: str, wanted: TeamWanted) -> Team:
        return await change_own_team(self._store.store, node_id, wanted)


async def change_own_team(store: Store, node_id: str, wanted: TeamWanted) -> Team:
    """Create, join or leave a team for the node, and return its team. Raises RefusedError if the change is not
    possible."""
    now = time.time()
    if wanted.action != "show":
        await asyncio.to_thread(store.write, change_team, node_id, wanted, now)
    return await asyncio.to_thread(store.read, read_own_team, node_id, now)
