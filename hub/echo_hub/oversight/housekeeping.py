"""Periodic work: record connected nodes, delete old data, and apply the operator's bans, pardons and invites."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable
from typing import Final

from echo_hub.config.training_sections import LearnerConfig
from echo_hub.core.accounting.events import NodePardoned
from echo_hub.core.status import StatusSource
from echo_hub.driving.event_queue import EventQueue
from echo_hub.intake.connected import ConnectedNodes
from echo_hub.net.distributor import Distributor
from echo_hub.net.invitations import Invitations
from echo_hub.run.directory import RunDirectory
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.invites import read_invites, read_num_invites
from echo_hub.store.known_nodes import note_still_here, read_banned_nodes
from echo_hub.store.standings import read_wanted_pardons
from echo_hub.store.tallies import read_useful_nodes

log = logging.getLogger(__name__)

HOUSEKEEPING_S: Final = 15.0
BANS_S: Final = 1.0
"""Seconds between two readings of bans, invites and pardons from the database, where the operator's commands write
them."""


def kept_steps(settings: LearnerConfig) -> int:
    """Return the number of newest steps, at least 2, whose tokens stay in the database. They are kept because a
    restarted learner may repeat all steps after the oldest kept checkpoint."""
    return settings.checkpoint_every * (settings.checkpoints_kept + 1)


class Housekeeping:
    """Periodic work on the database and the run directory."""

    def __init__(
        self,
        settings: LearnerConfig,
        *,
        store: AsyncStore,
        directory: RunDirectory,
        coordinator: StatusSource,
        queue: EventQueue,
        live: Collection[str],
        evaluating: Collection[int],
        bans: Distributor,
        invitations: Invitations,
        nodes: ConnectedNodes,
    ) -> None:
        """`live` holds the ids of the connected nodes. `evaluating` holds the versions that evaluations still need."""
        self._settings = settings
        self._store = store
        self._directory = directory
        self._coordinator = coordinator
        self._queue = queue
        self._live = live
        self._evaluating = evaluating
        self._bans = bans
        self._invitations = invitations
        self._nodes = nodes

    async def run(self) -> None:
        """Do the periodic work of `keep_house` every HOUSEKEEPING_S, until cancelled."""
        self._nodes.note_useful(await self._store.read(read_useful_nodes))
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            await self.keep_house()

    async def keep_house(self) -> None:
        """Delete old adapters. Record the connected nodes, and find the nodes whose work counted. Delete the tokens of
        steps older than every kept checkpoint.

        The adapters come first: writes to the store wait while the disk is full, and deleted adapters make room."""
        status = self._coordinator.status()
        await asyncio.to_thread(
            self._directory.forget_adapters,
            kept=self._settings.adapters_kept,
            max_bytes=self._settings.adapters_max_bytes,
            published_version=status.published_version,
            evaluating=set(self._evaluating),
        )
        if self._live:
            await self._store.write(note_still_here, list(self._live), time.time())
        self._nodes.note_useful(await self._store.read(read_useful_nodes))
        await self._store.on_writer(self._store.store.prune, status.trained_steps - kept_steps(self._settings))

    async def watch_bans(self) -> None:
        """Apply bans, ends of bans, and changed invites, until cancelled."""
        known, barred = None, None
        while True:
            if (number := await self._store.read(read_num_invites)) != known:
                self._invitations.renew(await self._store.read(read_invites))
                known = number
            banned = await self._store.read(read_banned_nodes)
            self._bans.bar(banned)
            if barred is not None:
                _log_bans(banned - barred, barred - banned)
            barred = banned
            await asyncio.sleep(BANS_S)

    async def watch_pardons(self) -> None:
        """Pass the operator's pardons of nodes to the coordinator, until cancelled. Pardons are passed repeatedly until
        the database has recorded them."""
        while True:
            for node_id in sorted(await self._store.read(read_wanted_pardons)):
                await self._queue.put(NodePardoned(node_id=node_id))
            await asyncio.sleep(BANS_S)


def _log_bans(banned: Iterable[str], unbanned: Iterable[str]) -> None:
    for node_id in sorted(banned):
        log.warning("node %s is banned", node_id, extra={"event": "node_banned", "subject": node_id})
    for node_id in sorted(unbanned):
        log.info("node %s may take part again", node_id, extra={"event": "node_unbanned", "subject": node_id})
