"""The node's current run: opened at the hub's first Welcome, and closed when the hub starts another run.

The run stays open across reconnects. Every Welcome updates its data.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Final

from echo_node.about import Welcomed
from echo_node.connections import NodeNetwork
from echo_node.core.events import Incoming
from echo_node.core.history import TokenHistory
from echo_node.engine.making import EngineMaker
from echo_node.host.hubs import HubRecord, Hubs, Joining
from echo_node.host.paths import NodePaths
from echo_node.host.shares import SharesFile
from echo_node.host.spool import Spool
from echo_node.host.trouble_log import TroubleLog
from echo_node.net.fetcher import Fetcher, Source
from echo_node.shell import RunParts, RunShell
from echo_shared.errors import DISK_FULL, StorageError
from echo_shared.signing.identity import fingerprint
from echo_shared.wire.messages import Totals, Welcome

log = logging.getLogger(__name__)

OPENING: Final = "opening the run"
"""Name under which the node's troubles (reported problems) list the opening of a run."""


class CurrentRun:
    """The node's current run. Call `take_up` at each Welcome, and `close` at the end."""

    def __init__(
        self,
        paths: NodePaths,
        joining: Joining,
        engines: EngineMaker,
        inbox: asyncio.Queue[Incoming],
        troubles: TroubleLog,
    ) -> None:
        self.welcomed: Welcomed | None = None
        """State since a hub admitted the node; None before."""
        self._paths = paths
        self._joining = joining
        self._engines = engines
        self._inbox = inbox
        self._troubles = troubles
        self._history = TokenHistory()
        engines.run_id = None if joining.pinned is None else joining.pinned.run_id

    @property
    def shell(self) -> RunShell | None:
        return None if self.welcomed is None else self.welcomed.shell

    @property
    def engine_pids(self) -> dict[str, int]:
        """Process id of each running engine, by device."""
        return {} if self.shell is None else self.shell.engine_pids

    @property
    def held_rollouts(self) -> int:
        return 0 if self.shell is None else self.shell.work.held_rollouts

    @property
    def owes_the_hub(self) -> bool:
        return self.shell is not None and self.shell.work.owes_the_hub

    @property
    def rests(self) -> bool:
        return self.shell is not None and self.shell.work.rests

    @property
    def works(self) -> bool:
        """True while the node samples, or gets ready to sample for a hub that it reaches (`WorkLoop.works`)."""
        return self.shell is not None and self.shell.work.works

    @property
    def token_rates(self) -> tuple[float, ...]:
        """Tokens per second in each of the last periods of ten seconds, oldest first (`TokenHistory.rates`). Only
        tokens of this run count.
        """
        return self._history.rates

    async def take_up(self, welcome: Welcome, connections: NodeNetwork) -> bool:
        """Open or update the run; files of another run are deleted first. If the hub has replaced the GGUF file that
        the engine reads, the run is opened again, which fetches what the hub offers now.

        Return False if the disk is full and the node may wait for space. Raises StorageError.
        """
        hub_key = connections.client.hub_key
        assert hub_key is not None, "the handshake pins the hub's key"
        self._log(welcome, hub_key)
        before = self.welcomed
        is_other = before is not None and before.welcome.run_id != welcome.run_id
        if before is not None and (is_other or before.shell.fetcher.is_withdrawn(welcome.gguf)):
            if is_other:
                log.warning("The hub has started another run: files of the old run are deleted.")
                self._history = TokenHistory()
            else:
                log.warning("The hub no longer offers the GGUF file of the base model: the engine starts again.")
            self.welcomed = None
            await before.shell.close()
            await before.shell.fetcher.close()
        known = self.welcomed or await self._open(welcome, hub_key, connections)
        if known is None:
            return False
        self.welcomed = replace(known, hub_key=hub_key, welcome=welcome)
        self._engines.run_id = welcome.run_id
        return True

    def hear(self, totals: Totals) -> None:
        if self.welcomed is not None:
            self.welcomed = replace(self.welcomed, totals=totals)

    async def count(self) -> None:
        if (shell := self.shell) is not None:
            await shell.writer.refresh()
            self._history.note(shell.work.progress.drawn_tokens, asyncio.get_running_loop().time())

    async def close(self) -> None:
        """End the run's tasks and its engine. The data of this object stays readable."""
        if self.welcomed is not None:
            await self.welcomed.shell.close()

    def _log(self, welcome: Welcome, hub_key: bytes) -> None:
        if self.welcomed is not None:
            return  # Log only the first Welcome: the client logs reconnects itself.
        known = self._joining.pinned is not None and self._joining.pinned.hub_key == hub_key
        log.info("Connected to %s at %s.", welcome.run_name, self._joining.address.origin)
        log.info("The hub's key: %s (%s).", fingerprint(hub_key), "as before" if known else "pinned now")

    async def _open(self, welcome: Welcome, hub_key: bytes, connections: NodeNetwork) -> Welcomed | None:
        try:
            shell = await self._open_shell(welcome, hub_key, connections)
        except StorageError as error:
            if not self._joining.patient or error.code != DISK_FULL:
                raise
            self._troubles.met(OPENING, error)
            return None
        self._troubles.end(OPENING)
        await shell.writer.refresh()
        return Welcomed(hub_key=hub_key, welcome=welcome, shell=shell, counts_before=shell.writer.counts)

    async def _open_shell(self, welcome: Welcome, hub_key: bytes, connections: NodeNetwork) -> RunShell:
        """Store the hub's record, and restore this run's state from disk. Raises StorageError."""
        parts = RunParts(
            spool=await self._open_spool(welcome, hub_key),
            fetcher=self._make_fetcher(welcome, hub_key, connections),
            engines=self._engines,
            client=connections.client,
            inbox=self._inbox,
            derived=self._paths.derived,
            logs=self._paths.logs,
            capacity_factor=self._engines.config.capacity_factor,
            troubles=self._troubles,
            online=connections.bulk,
        )
        shell = RunShell(parts)
        try:
            await shell.open(welcome.policy_version)
        except BaseException:
            await shell.close()
            raise
        return shell

    async def _open_spool(self, welcome: Welcome, hub_key: bytes) -> Spool:
        joining = self._joining
        record = HubRecord(
            url=joining.address.origin,
            hub_key_hex=hub_key.hex(),
            joined_at=time.time(),
            invite_token=joining.invite_token,
            run_id=welcome.run_id,
            run_name=welcome.run_name,
            flags=dict(joining.flags),
        )
        hubs = Hubs(self._paths)
        before = await asyncio.to_thread(hubs.last)
        await asyncio.to_thread(hubs.save, record)
        if joining.share is not None:
            shares, last = SharesFile(self._paths.shares_file), None if before is None else before.url
            await asyncio.to_thread(shares.joined, record.url, joining.share, before=last)
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

    def _make_fetcher(self, welcome: Welcome, hub_key: bytes, connections: NodeNetwork) -> Fetcher:
        source = Source(
            address=self._joining.address, hub_key=hub_key, run_id=welcome.run_id, tracker_path=welcome.tracker_path
        )
        return Fetcher(
            connections.swarm,
            connections.receiver,
            source,
            artefacts=self._paths.artefacts,
            carriers=self._paths.carriers,
            meter=connections.meter,
            backend=self._engines.config.wanted_backend,
            precision=self._engines.config.precision,
        )
