"""The node's end of its engine: a child process that samples. Imports no engine.

A worker says every few seconds that it lives and gets on. One that falls silent, stalls, or takes more memory than it
may is killed; each end of a worker is a BackendError that says why.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from echo_node.backends import memory
from echo_node.backends.base import OUT_OF_MEMORY, EngineEvent, EngineSettings, GroupFailed
from echo_node.backends.frames import error_from_frame, group_to_frame, rollouts_from_frame
from echo_node.backends.registry import BackendChoice
from echo_shared.child import Child, ChildExited, Frame
from echo_shared.errors import BackendError
from echo_shared.sampling import GroupRequest

WORKER: Final = "echo_node.backends.worker"

START_TIMEOUT_S: Final = 1_800.0
"""Enough to convert and load a large model from a slow disk."""

STOP_TIMEOUT_S: Final = 3.0
"""A worker holds nothing that is not elsewhere too, so it is not waited for long."""

DIED: Final = "worker_died"
SILENT: Final = "worker_silent"
STALLED: Final = "worker_stalled"
STOPPED: Final = "worker_stopped"
"""Codes of the BackendError that ends a worker; besides, OUT_OF_MEMORY and what an engine itself says."""

_RATE_WINDOW_S: Final = 10.0
_GIB: Final = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a worker is given up."""

    memory_bytes: int
    """Of its own, model files mapped into it not counted; 0 = no limit."""
    silent_s: float = 30.0
    silent_start_s: float = 300.0
    """As silent_s, while it loads libraries and the model: either may hold up all of its threads."""
    stalled_s: float = 600.0
    """Without one step of the sampling loop, while it has work."""
    beat_s: float = 2.0
    """Between two signs of life."""
    look_s: float = 1.0
    """Between two looks at the worker."""


class EngineChild:
    """One running worker. After a BackendError from `events` it is of no more use: start another."""

    def __init__(self, child: Child, limits: Limits) -> None:
        self.width = 0
        """Rollouts that the engine samples at once."""
        self._child = child
        self._limits = limits
        self._receiving: asyncio.Task[Frame] | None = None
        self._look_at = 0.0
        self._used_bytes = 0
        self._kernel_kills = memory.kernel_kills()
        self._stopped = False
        self._recent: deque[tuple[int, float]] = deque()

    @classmethod
    async def start(
        cls,
        choice: BackendChoice,
        *,
        base_dir: Path,
        derived_dir: Path,
        log: Path,
        settings: EngineSettings,
        limits: Limits,
    ) -> EngineChild:
        """Starts a worker and waits until its model is loaded. `choice` decides the device.

        Raises BackendError when the engine cannot run this model, or its process ends over it.
        """
        try:
            engine = cls(await Child.start(WORKER, name="engine's", log=log), limits)
        except OSError as error:
            raise BackendError("The engine's process cannot be started.", got=str(error), code=DIED) from error
        command = {
            "backend": choice.name,
            "base_dir": str(base_dir),
            "derived_dir": str(derived_dir),
            "settings": {**asdict(settings), "device": choice.device},
            "beat_s": limits.beat_s,
        }
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await engine.open(command)
        except TimeoutError as error:
            await engine.stop()
            raise BackendError(
                "The sampling engine does not load its model.", got=f"nothing after {START_TIMEOUT_S:.0f} s"
            ) from error
        except BaseException:
            await engine.stop()
            raise
        return engine

    async def open(self, command: Frame) -> None:
        """Has the worker load its model."""
        try:
            await self._child.send(command)
        except ChildExited as error:
            raise self._why(error) from error
        self.width = (await self._receive())["width"]

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens a second of sampling, over the last seconds the engine was busy; 0 before the first."""
        tokens = sum(count for count, _ in self._recent)
        return tokens / sum(seconds for _, seconds in self._recent) if tokens else 0.0

    async def add_policy(self, version: int, adapter_dir: Path | None) -> None:
        """Makes `version` known; None is the bare base, as which version 0 is known from the start.

        The adapter is read and prepared at once, while another version samples. Raises ChildExited, as all commands.
        """
        await self._child.send(
            {"type": "add_policy", "version": version, "dir": None if adapter_dir is None else str(adapter_dir)}
        )

    async def drop_policy(self, version: int) -> None:
        """Forgets `version`, of which no group is left."""
        await self._child.send({"type": "drop_policy", "version": version})

    async def submit(self, request: GroupRequest) -> None:
        """Queues a group. Each of its rollouts comes back by `events`, or one GroupFailed for what is left of it."""
        await self._child.send({"type": "submit", "group": group_to_frame(request)})

    async def cancel(self, lease_id: int) -> None:
        """Gives up what is unfinished of a lease. A rollout that is on its way already may still come."""
        await self._child.send({"type": "cancel", "lease_id": lease_id})

    async def measure(self, *, widths: Sequence[int], budget_s: float) -> list[dict[str, Any]]:
        """The engine's speed, as `measure.measure` gives it. Before the first group. Raises BackendError."""
        try:
            await self._child.send({"type": "measure", "widths": list(widths), "budget_s": budget_s})
        except ChildExited as error:
            raise self._why(error) from error
        limit_s = budget_s + self._limits.stalled_s
        try:
            async with asyncio.timeout(limit_s):
                frame = await self._receive()
        except TimeoutError:
            await self._give_up("The sampling engine stalled.", STALLED, f"no measurement in {limit_s:.0f} s")
        rows: list[dict[str, Any]] = frame["rows"]
        return rows

    async def events(self) -> AsyncIterator[EngineEvent]:
        """What the worker finished or failed, until it ends, which raises BackendError. For one reader; cancel-safe."""
        while True:
            frame = await self._receive()
            if frame["type"] == "finished":
                self._count(frame)
                for rollout in rollouts_from_frame(frame):
                    yield rollout
            else:
                yield GroupFailed(lease_id=frame["lease_id"], code=frame["code"], what=frame["what"])

    async def _receive(self) -> Frame:
        """The next frame that is no sign of life, the worker being looked after meanwhile. Cancel-safe.

        Silence is counted in looks, not by a clock: a machine that slept has not made its worker fall silent.
        """
        silent_looks = 0
        while True:
            if self._stopped:
                raise BackendError("The sampling engine was stopped.", code=STOPPED)
            if self._receiving is None:
                self._receiving = asyncio.create_task(self._child.receive())
            done, _ = await asyncio.wait({self._receiving}, timeout=self._limits.look_s)
            silent_looks = 0 if done else silent_looks + 1
            await self._check(silent_looks * self._limits.look_s)
            if self._stopped or not done:
                continue
            received, self._receiving = self._receiving, None
            try:
                frame = received.result()
            except ChildExited as error:
                raise self._why(error) from error
            if frame["type"] == "ended":
                raise error_from_frame(frame)
            if frame["type"] != "alive":
                return frame
            if frame["stalled_s"] > self._limits.stalled_s:
                await self._give_up("The sampling engine stalled.", STALLED, f"no step in {frame['stalled_s']:.0f} s")

    async def _check(self, silent_s: float) -> None:
        if silent_s > (self._limits.silent_s if self.width else self._limits.silent_start_s):
            await self._give_up("The sampling engine does not answer.", SILENT, f"no sign of life in {silent_s:.0f} s")
        now = asyncio.get_running_loop().time()
        if now < self._look_at:
            return
        self._look_at = now + self._limits.look_s
        self._used_bytes = await asyncio.to_thread(memory.own_bytes, self.pid) or self._used_bytes
        if 0 < self._limits.memory_bytes < self._used_bytes:
            figures = f"{self._used_bytes / _GIB:.2f} GiB, {self._limits.memory_bytes / _GIB:.2f} GiB allowed"
            await self._give_up("The sampling engine took more memory than it may.", OUT_OF_MEMORY, figures)

    async def _give_up(self, what: str, code: str, got: str) -> NoReturn:
        self._child.kill()
        await self.stop()
        raise BackendError(what, code=code, got=got)

    def _count(self, frame: Frame) -> None:
        self._recent.append((sum(frame["lengths"]), frame["busy_s"]))
        while len(self._recent) > 1 and sum(seconds for _, seconds in self._recent) > _RATE_WINDOW_S:
            self._recent.popleft()

    async def stop(self) -> None:
        """Ends the worker, if need be by force. Harmless when it has ended; who reads `events` is told."""
        self._stopped = True
        await self._child.stop(timeout_s=STOP_TIMEOUT_S)
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.wait({self._receiving})
            if not self._receiving.cancelled():
                self._receiving.exception()  # ChildExited, which nobody needs to be told any more.

    def _why(self, error: ChildExited) -> BackendError:
        """What to say of a worker's end.

        Kills that are ours do not come here: a SIGKILL is the kernel's, for memory, unless it denies it.
        """
        denied = self._kernel_kills is not None and self._kernel_kills == memory.kernel_kills()
        if sys.platform == "win32" or error.returncode != -signal.SIGKILL or denied:
            return BackendError(error.what, got=error.got, do=error.do, code=DIED)
        return BackendError(
            "The sampling engine was killed, most likely because the machine ran out of memory.",
            got=f"it held {self._used_bytes / _GIB:.2f} GiB shortly before",
            do=error.do,
            code=OUT_OF_MEMORY,
        )
