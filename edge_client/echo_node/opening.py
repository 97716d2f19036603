"""Open the shell of a run, once a hub's Welcome names the run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from echo_node.config import NodeConfig
from echo_node.connections import Connections
from echo_node.engine.supervisor import EngineFiles, EngineSupervisor
from echo_node.host.base_forms import conversion_bytes
from echo_node.host.hubs import HubRecord, Hubs, Joining
from echo_node.host.paths import NodePaths
from echo_node.host.shares import SharesFile
from echo_node.host.spool import Spool
from echo_node.host.trouble_log import TroubleLog
from echo_node.net.fetcher import Fetcher, Source
from echo_node.shell import Deliver, RunParts, RunShell
from echo_shared.errors import StorageError
from echo_shared.wire.messages import Welcome

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Parts common to every run's shell. Call `open` once for each run."""

    paths: NodePaths
    config: NodeConfig
    joining: Joining
    connections: Connections
    make_engine: Callable[[EngineFiles], EngineSupervisor]
    deliver: Deliver
    troubles: TroubleLog

    async def open(self, welcome: Welcome, hub_key: bytes) -> RunShell:
        """Store the hub's record, and restore this run's state from disk. Raises StorageError."""
        spool = await self._open_spool(welcome, hub_key)
        shell = RunShell(
            RunParts(
                spool=spool,
                fetcher=self._make_fetcher(welcome, hub_key),
                make_engine=self.make_engine,
                send=self.connections.client.send,
                deliver=self.deliver,
                derived=self.paths.derived,
                logs=self.paths.logs,
                capacity_factor=self.config.capacity_factor,
                troubles=self.troubles,
                online=self.connections.bulk,
            )
        )
        try:
            await shell.open(welcome.policy_version)
        except BaseException:
            await shell.close()
            raise
        return shell

    async def _open_spool(self, welcome: Welcome, hub_key: bytes) -> Spool:
        record = HubRecord(
            url=self.joining.address.origin,
            hub_key_hex=hub_key.hex(),
            joined_at=time.time(),
            invite_token=self.joining.invite_token,
            run_id=welcome.run_id,
            run_name=welcome.run_name,
            flags=dict(self.joining.flags),
        )
        hubs = Hubs(self.paths)
        before = await asyncio.to_thread(hubs.last)
        await asyncio.to_thread(hubs.save, record)
        if self.joining.share is not None:
            shares, last = SharesFile(self.paths.shares_file), None if before is None else before.url
            await asyncio.to_thread(shares.joined, record.url, self.joining.share, before=last)
        spool = Spool(hubs.directory(record) / "spool.db")
        try:
            await asyncio.to_thread(spool.open)
            lost = await asyncio.to_thread(spool.begin_run, welcome.run_id)
        except StorageError:
            await asyncio.to_thread(spool.close)
            raise
        if lost:
            log.warning("%d rollouts of the hub's last run can no longer be trained on.", lost)
        return spool

    def _make_fetcher(self, welcome: Welcome, hub_key: bytes) -> Fetcher:
        source = Source(
            address=self.joining.address, hub_key=hub_key, run_id=welcome.run_id, tracker_path=welcome.tracker_path
        )
        return Fetcher(
            self.connections.swarm,
            self.connections.receiver,
            source,
            artefacts=self.paths.artefacts,
            carriers=self.paths.carriers,
            on_downloaded=lambda count: self.connections.meter.count(received=count),
            conversion_bytes=partial(
                conversion_bytes, backend=self.config.wanted_backend, precision=self.config.precision
            ),
        )
