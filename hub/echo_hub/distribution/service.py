"""The distribution service: publishes versions, announces them, spreads them among the nodes, and records that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import assert_never

from echo_hub.core.accounting.effects import AnnounceVersion, DistributionAction, PublishVersion
from echo_hub.dashboard.source import Changes
from echo_hub.distribution.publishing import Publishing
from echo_hub.driving.shared import Shared
from echo_hub.net.broadcaster import Broadcaster
from echo_hub.net.distributor import Distributor
from echo_hub.net.rendezvous import Rendezvous
from echo_hub.net.sightings import Sightings
from echo_hub.spread.holdings import Arrival, Release
from echo_hub.store.async_store import AsyncStore
from echo_hub.training.own_sampler import OwnSampler


class DistributionService:
    """Owns the distributor and the publishing of versions."""

    def __init__(self, shared: Shared, own_sampler: OwnSampler | None) -> None:
        """`own_sampler`: the hub's own sampler, in co-located mode."""
        resources = shared.resources
        config = resources.config
        rendezvous = None
        if config.dissemination.punching:
            rendezvous = Rendezvous(Sightings(resources.me), now=time.time(), public=bool(config.server.public_url))
        self.distributor = Distributor(
            settings=config.dissemination,
            publisher=resources.publisher,
            broadcaster=Broadcaster(shared.connections),
            connections=shared.connections,
            books=DistributionRecords(resources.store, shared.changes),
            live=shared.live,
            rendezvous=rendezvous,
        )
        self.publishing = Publishing(
            distributor=self.distributor,
            directory=resources.directory,
            queue=shared.queue,
            room=resources.store.room,
            own_sampler=own_sampler,
        )

    def handle(self, action: DistributionAction) -> None:
        match action:
            case PublishVersion():
                self.publishing.submit(action.policy_version)
            case AnnounceVersion():
                self.distributor.announce(action.policy_version)
            case _:
                assert_never(action)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.publishing.run())
            tasks.create_task(self.distributor.run())


class DistributionRecords:
    """Commits releases and arrivals, then notifies the pages."""

    def __init__(self, store: AsyncStore, changes: Changes) -> None:
        self._store = store
        self._changes = changes

    async def record(self, news: Sequence[Release | Arrival]) -> None:
        await self._store.on_writer(self._store.store.record_distribution, news, time.time())
        self._changes.notify()
