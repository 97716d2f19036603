"""The sampling engine as the work loop sees it: one child process at a time, its news as events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from echo_node.backends.base import EngineSettings
from echo_node.backends.process import Backend
from echo_node.backends.registry import BackendChoice
from echo_node.core import events
from echo_node.core.events import BackendLost, BackendReady, RolloutFinished
from echo_shared.child import ChildExited
from echo_shared.errors import BackendError
from echo_shared.sampling import FinishedRollout, GroupRequest

log = logging.getLogger(__name__)

EngineEvent = BackendReady | BackendLost | RolloutFinished | events.GroupFailed
Deliver = Callable[[EngineEvent], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFiles:
    """Where the engine reads and writes."""

    base_dir: Path
    derived_dir: Path
    log: Path


class Engine:
    """Calls for a process that is not there, or has just ended, do nothing: BackendLost tells of the end."""

    def __init__(self, choice: BackendChoice, settings: EngineSettings, files: EngineFiles, deliver: Deliver) -> None:
        self._choice = choice
        self._settings = settings
        self._files = files
        self._deliver = deliver
        self._backend: Backend | None = None

    async def run(self, after_s: float) -> None:
        """One process from start to end: delivers BackendReady, what it samples, and BackendLost at its end."""
        await asyncio.sleep(after_s)
        try:
            backend = await Backend.start(
                self._choice,
                base_dir=self._files.base_dir,
                derived_dir=self._files.derived_dir,
                log=self._files.log,
                settings=self._settings,
            )
        except (BackendError, ChildExited) as error:
            log.warning("The sampling engine does not start: %s", error)
            await self._deliver(BackendLost(what=error.what))
            return
        self._backend = backend
        try:
            await self._deliver(BackendReady(width=backend.width))
            async for event in backend.events():
                if isinstance(event, FinishedRollout):
                    await self._deliver(RolloutFinished(rollout=event, tokens_per_s=backend.tokens_per_s))
                else:
                    await self._deliver(events.GroupFailed(lease_id=event.lease_id, what=event.what))
        except ChildExited as error:
            log.warning("The sampling engine ended: %s", error)
            self._backend = None
            await self._deliver(BackendLost(what=error.what))
        finally:
            self._backend = None
            await backend.stop()

    async def add_policy(self, version: int, directory: Path | None) -> None:
        if self._backend is not None:
            with suppress(ChildExited):
                await self._backend.add_policy(version, directory)

    async def drop_policy(self, version: int) -> None:
        if self._backend is not None:
            with suppress(ChildExited):
                await self._backend.drop_policy(version)

    async def submit(self, request: GroupRequest) -> None:
        if self._backend is not None:
            with suppress(ChildExited):
                await self._backend.submit(request)

    async def cancel(self, lease_id: int) -> None:
        if self._backend is not None:
            with suppress(ChildExited):
                await self._backend.cancel(lease_id)
