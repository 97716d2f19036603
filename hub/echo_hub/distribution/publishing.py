"""Publish versions one after the other: each exported adapter becomes an artefact that every node can fetch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path

from echo_hub.core.accounting.events import VersionPublished, VersionUnusable
from echo_hub.driving.event_queue import EventQueue
from echo_hub.net.distributor import Distributor
from echo_hub.run.directory import RunDirectory
from echo_hub.run.offered_gguf import OfferedGguf
from echo_hub.training.own_sampler import OwnSampler
from echo_shared.delta.adapter import WEIGHTS_FILE, not_finite
from echo_shared.delta.tensors import TensorFile
from echo_shared.errors import CodecError
from echo_shared.files.full_disk import Room

log = logging.getLogger(__name__)


class Publishing:
    """Publishes versions, and reports each one to the coordinator. A version whose adapter no engine can use is not
    published."""

    def __init__(
        self,
        *,
        distributor: Distributor,
        directory: RunDirectory,
        queue: EventQueue,
        room: Room,
        own_sampler: OwnSampler | None = None,
    ) -> None:
        """`room`: retries a write while the disk is full. `own_sampler`: the hub's own sampler, in co-located mode."""
        self._distributor = distributor
        self._directory = directory
        self._queue = queue
        self._room = room
        self._own_sampler = own_sampler
        self._waiting: asyncio.Queue[int] = asyncio.Queue()

    async def reopen(
        self,
        base_dir: Path,
        *,
        base_source: str | None,
        base_gguf: OfferedGguf | None = None,
        published_version: int,
        banned: Collection[str],
    ) -> None:
        """Publish the base and the newest version again after a start of the hub. This takes long at the first start,
        and if artefacts were damaged.

        `base_source`: the base's id and revision on the model hub from which nodes try to fetch it first. `base_gguf`:
        the base as a GGUF file, for nodes that run llama.cpp.
        """
        await self._distributor.open()
        self._distributor.bar(frozenset(banned))
        await self._distributor.publish_base(base_dir, source=base_source, gguf=base_gguf)
        if published_version:
            await self._distributor.publish(published_version, self._directory.adapter(published_version))

    def submit(self, policy_version: int) -> None:
        """Queue a version. The learner is at most two steps ahead, so the queue is not bounded."""
        self._waiting.put_nowait(policy_version)

    async def run(self) -> None:
        while True:
            version = await self._waiting.get()
            adapter = self._directory.adapter(version)
            if reason := await asyncio.to_thread(_fault, adapter):
                extra = {"event": "version_unusable", "subject": str(version)}
                log.error("version %d is not published: %s", version, reason, extra=extra)
                await self._queue.put(VersionUnusable(policy_version=version, reason=reason))
                continue
            await self._room.until_done(partial(self._distributor.publish, version, adapter))
            await self._queue.put(VersionPublished(policy_version=version))
            if self._own_sampler is not None:
                await self._own_sampler.holds(version)

    async def keep_for_evaluation(self, policy_version: int) -> None:
        """Keep this version published, however old it is. Version 0 is the base, which stays published in any case."""
        if policy_version:
            adapter = self._directory.adapter(policy_version)
            await self._room.until_done(partial(self._distributor.keep_for_evaluation, policy_version, adapter))

    async def publish_for_tenant(self, policy_version: int, directory: Path) -> None:
        """Publish an adapter that a tenant draws with, without an announcement: a node gets it with its first lease. Do
        nothing if it is published. Raises CodecError if no engine can use the adapter."""
        if self._distributor.has(policy_version):
            return
        if reason := await asyncio.to_thread(_fault, directory):
            raise _unusable(policy_version, reason)
        await self._room.until_done(partial(self._distributor.publish_for_tenant, policy_version, directory))

    async def withdraw_for_tenant(self, policy_version: int) -> None:
        await self._distributor.withdraw_for_tenant(policy_version)

    def hold_for_tenants(self, versions: Iterable[int]) -> None:
        """Keep these versions published, however old they are, until the next call."""
        self._distributor.hold_for_tenants(versions)


def _unusable(policy_version: int, reason: str) -> CodecError:
    return CodecError(
        "No engine can draw with this adapter, so it is not published.",
        got=f"version {policy_version}: {reason}",
        do="Train with a smaller learning rate, or load an earlier checkpoint.",
    )


def _fault(adapter_dir: Path) -> str:
    """Return why no engine can use an exported adapter; empty if no fault was found. Unreadable files are reported when
    the adapter is published."""
    try:
        lost = not_finite(TensorFile(adapter_dir / WEIGHTS_FILE))
    except CodecError as error:
        return error.brief
    except OSError:
        return ""
    return f"{len(lost)} tensors of its adapter hold values that are not finite, the first {lost[0]}" if lost else ""
