"""A node's own records, which the node may read over HTTP: receipts, certificate of contribution, team, and fleet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence

from echo_hub.driving.resources import Resources
from echo_hub.intake.command_relay import CommandRelay
from echo_hub.store.node_records import read_contribution
from echo_hub.store.owners import (
    OwnedNode,
    read_counts_once,
    read_is_owned,
    read_owned,
    read_owned_ids,
    set_counts_once,
)
from echo_hub.store.reading import read_receipts
from echo_hub.store.store import Store
from echo_hub.store.teams import change_team, read_own_team
from echo_shared.errors import RefusedError
from echo_shared.records.contribution import sign
from echo_shared.wire.messages import (
    Fleet,
    FleetNode,
    FleetReport,
    FleetWanted,
    Receipt,
    RefusalCode,
    Team,
    TeamWanted,
)
from echo_shared.wire.owner_commands import is_signed
from echo_shared.wire.sessions import check_claim


class NodeRecords:
    """Reads and changes the records of single nodes in the store."""

    def __init__(self, resources: Resources, relay: CommandRelay, connected: Collection[str]) -> None:
        """`connected`: ids of the connected nodes."""
        self._resources = resources
        self._store = resources.store
        self._relay = relay
        self._connected = connected

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

    async def fleet(self, node_id: str, wanted: FleetWanted) -> Fleet:
        """Pass the owner's command on, and return the owner's nodes. Raises RefusedError unless the asking node has
        joined as a node of this owner and proves that it belongs to the owner."""
        owner = wanted.owner
        check_claim(owner, node_id=node_id, hub_key=self._resources.me.public_key)
        owner_key = owner.owner_key.hex()
        if not await self._store.read(read_is_owned, node_id, owner_key):
            raise RefusedError(
                "This node has not joined the hub as one of its owner's nodes.",
                do="Start the node, or wait until it has connected again: echo-node run",
            )
        if wanted.command is not None and not is_signed(wanted.command, owner.owner_key):
            raise RefusedError("The command is not signed with the owner's key.", code=RefusalCode.BAD_SIGNATURE)
        if wanted.counts_once is not None:
            await self._store.write(set_counts_once, owner_key, counts_once=wanted.counts_once)
        reports: Mapping[str, FleetReport] = {}
        owned = await self._store.read(read_owned_ids, owner_key)
        if wanted.command is not None:
            reports = await self._relay.ask(wanted.command, sorted(owned & set(wanted.to or self._connected)))
        return Fleet(
            counts_once=await self._store.read(read_counts_once, owner_key),
            num_nodes=len(owned),
            nodes=tuple(
                self._shown(node, reports.get(node.node_id)) for node in await self._store.read(read_owned, owner_key)
            ),
        )

    def _shown(self, node: OwnedNode, report: FleetReport | None) -> FleetNode:
        return FleetNode(
            node_key=node.node_key,
            claim=node.claim,
            name=node.name,
            is_connected=node.node_id in self._connected,
            last_seen=node.last_seen,
            rollouts=node.rollouts,
            tokens=node.tokens,
            report=report,
        )


async def change_own_team(store: Store, node_id: str, wanted: TeamWanted) -> Team:
    """Create, join or leave a team for the node, and return its team. Raises RefusedError if the change is not
    possible."""
    now = time.time()
    if wanted.action != "show":
        await asyncio.to_thread(store.write, change_team, node_id, wanted, now)
    return await asyncio.to_thread(store.read, read_own_team, node_id, now)
