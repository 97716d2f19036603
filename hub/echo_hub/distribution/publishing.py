"""Versions on their way out, one after the other: exported adapters become artefacts that every node can fetch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path

from echo_hub.config.sections import HubConfig
from echo_hub.core.events import VersionPublished, VersionUnusable
from echo_hub.core.settings import CoordinatorSettings
from echo_hub.evaluation.due import is_due
from echo_hub.net.distributor import Distributor
from echo_hub.run.directory import RunDirectory
from echo_shared.adapter import WEIGHTS_FILE, not_finite
from echo_shared.errors import CodecError
from echo_shared.room import Room
from echo_shared.tensors import TensorFile

log = logging.getLogger(__name__)


class Publishing:
    """`report` tells the coordinator of each version that is out, and of each one that no engine could use: that is not
    published."""

    def __init__(
        self,
        *,
        distributor: Distributor,
        directory: RunDirectory,
        report: Callable[[VersionPublished | VersionUnusable], Awaitable[None]],
        room: Room,
    ) -> None:
        self._distributor = distributor
        self._directory = directory
        self._report = report
        self._room = room
        self._waiting: asyncio.Queue[int] = asyncio.Queue()

    async def reopen(
        self, base_dir: Path, *, base_source: str | None, published_version: int, banned: Collection[str]
    ) -> None:
        """Publishes again what the run has published: at once unless an artefact was damaged or removed; at its first
        start, the base.

        `base_source`: where nodes find the base on a model hub, if they are to look there first.
        """
        await self._distributor.open()
        self._distributor.bar(frozenset(banned))
        await self._distributor.publish_base(base_dir, source=base_source)
        if published_version:
            await self._distributor.publish(published_version, self._directory.adapter(published_version))

    def submit(self, policy_version: int) -> None:
        """Queues a version. At most one waits for each step that the learner is ahead, so the queue needs no bound."""
        self._waiting.put_nowait(policy_version)

    async def run(self) -> None:
        """Publishes for ever."""
        while True:
            version = await self._waiting.get()
            adapter = self._directory.adapter(version)
            if reason := await asyncio.to_thread(_fault, adapter):
                extra = {"event": "version_unusable", "subject": str(version)}
                log.error("version %d is not published: %s", version, reason, extra=extra)
                await self._report(VersionUnusable(policy_version=version, reason=reason))
                continue
            await self._room.until_done(partial(self._distributor.publish, version, adapter))
            await self._report(VersionPublished(policy_version=version))

    async def keep_for_evaluation(self, policy_version: int) -> None:
        """Nodes can fetch this version from now on, however old it is; the base they have."""
        if policy_version:
            adapter = self._directory.adapter(policy_version)
            await self._room.until_done(partial(self._distributor.keep_for_evaluation, policy_version, adapter))


def _fault(adapter_dir: Path) -> str:
    """Why no engine can use an exported adapter; empty = nothing is known against it. Publishing it says why it cannot
    be read."""
    try:
        lost = not_finite(TensorFile(adapter_dir / WEIGHTS_FILE))
    except CodecError as error:
        return error.brief
    except OSError:
        return ""
    return f"{len(lost)} tensors of its adapter hold values that are not finite, the first {lost[0]}" if lost else ""


def export_path(config: HubConfig, directory: RunDirectory, settings: CoordinatorSettings, step: int) -> Path | None:
    """Where the adapter of this step goes: None when the version is neither published nor evaluated."""
    return directory.adapter(step) if settings.is_due(step) or is_due(config, step) else None
