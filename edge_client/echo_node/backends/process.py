"""The node's end of its backend: a child process that samples. Imports no engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

from echo_node.backends.base import EngineEvent, EngineSettings, GroupFailed
from echo_node.backends.frames import group_to_frame, rollouts_from_frame
from echo_node.backends.registry import BackendChoice
from echo_shared.child import Child, Frame
from echo_shared.errors import BackendError
from echo_shared.sampling import GroupRequest

START_TIMEOUT_S: Final = 1_800.0
"""Enough to convert and load a large model from a slow disk."""

STOP_TIMEOUT_S: Final = 3.0
"""A worker holds nothing that is not elsewhere too, so it is not waited for long."""

_RATE_WINDOW_S: Final = 10.0


class Backend:
    """One running worker. After ChildExited it is of no more use: start another and submit what is unfinished again."""

    def __init__(self, child: Child, *, width: int) -> None:
        self.width = width
        """Rollouts that the engine samples at once."""
        self._child = child
        self._recent: deque[tuple[int, float]] = deque()

    @classmethod
    async def start(
        cls, choice: BackendChoice, *, base_dir: Path, derived_dir: Path, log: Path, settings: EngineSettings
    ) -> Backend:
        """Starts a worker and waits until its model is loaded. `choice` decides the device.

        Raises BackendError when the engine cannot run this model, ChildExited when it dies over it.
        """
        child = await Child.start("echo_node.backends.worker", name="backend", log=log)
        command = {
            "backend": choice.name,
            "base_dir": str(base_dir),
            "derived_dir": str(derived_dir),
            "settings": {**asdict(settings), "device": choice.device},
        }
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await child.send(command)
                frame = await child.receive()
            if frame["type"] != "ready":
                raise BackendError(frame["what"], got=frame["got"], do=frame["do"], code=frame["code"])
        except BaseException:
            await child.stop(timeout_s=STOP_TIMEOUT_S)
            raise
        return cls(child, width=frame["width"])

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens a second of sampling, over the last seconds the engine was busy; 0 before the first."""
        tokens = sum(count for count, _ in self._recent)
        return tokens / sum(seconds for _, seconds in self._recent) if tokens else 0.0

    async def add_policy(self, version: int, adapter_dir: Path | None) -> None:
        """Makes `version` known; None is the bare base, as which version 0 is known from the start."""
        await self._child.send(
            {"type": "add_policy", "version": version, "dir": None if adapter_dir is None else str(adapter_dir)}
        )

    async def drop_policy(self, version: int) -> None:
        """Forgets `version`: its directory may go once the groups of it that were submitted are finished."""
        await self._child.send({"type": "drop_policy", "version": version})

    async def submit(self, request: GroupRequest) -> None:
        """Queues a group. Each of its rollouts comes back by `events`, or one GroupFailed for what is left of it."""
        await self._child.send({"type": "submit", "group": group_to_frame(request)})

    async def cancel(self, lease_id: int) -> None:
        """Gives up what is unfinished of a lease. A rollout that is on its way already may still come."""
        await self._child.send({"type": "cancel", "lease_id": lease_id})

    async def events(self) -> AsyncIterator[EngineEvent]:
        """What the worker finished or failed, until it ends, which raises ChildExited. For one reader."""
        async for frame in self._child.frames():
            if frame["type"] == "finished":
                self._count(frame)
                for rollout in rollouts_from_frame(frame):
                    yield rollout
            else:
                yield GroupFailed(lease_id=frame["lease_id"], code=frame["code"], what=frame["what"])

    def _count(self, frame: Frame) -> None:
        self._recent.append((sum(frame["lengths"]), frame["busy_s"]))
        while len(self._recent) > 1 and sum(seconds for _, seconds in self._recent) > _RATE_WINDOW_S:
            self._recent.popleft()

    async def stop(self) -> None:
        """Ends the worker, if need be by force. Harmless when it has ended."""
        await self._child.stop(timeout_s=STOP_TIMEOUT_S)
