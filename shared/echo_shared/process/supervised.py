"""A supervised child process: its start, readiness, heartbeat, memory and end are monitored, and each end has a reason.

    child = await SupervisedChild.start(Command("package.module", name="verifying", log=log), {"base": "..."})
    child.ready                                   the child's answer to the opening frame
    await child.send({"call": 1})
    answer = await child.receive(within_s=60.0)   raises ChildExited if the child has ended, for any reason
    await child.stop()

The child takes the opening frame from its `ParentPipe`, runs inside a `heartbeat.Heartbeat`, and answers. The code that
started the child decides on restarts (`backoff.Restarts`). The engine, the learner and the scorers are such children.

Waiting time is summed over checks of the child, and each check counts at most `look_s`: otherwise a child would look
silent after its machine was suspended.
"""

from __future__ import annotations

import asyncio
import math
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from echo_shared.process import process_memory
from echo_shared.process.child import ENDING_S, OUT_OF_MEMORY_STATUS, Child, ChildExited, Death, Frame
from echo_shared.process.heartbeat import ALIVE

_GIB: Final = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    module: str
    arguments: tuple[str, ...] = ()
    name: str
    """Name in texts such as "The NAME process ended"."""
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the child, besides those of this process."""
    ends_its_own: bool = False
    """True: end the child by SIGTERM instead of SIGKILL, so that the child can first end processes that it started in
    other sessions.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildLimits:
    """Limits beyond which a child is killed. The defaults are for children with a heartbeat; use NO_HEARTBEAT for
    others.
    """

    memory_bytes: int = 0
    """Maximum private memory, which excludes mapped model files; 0 = no limit."""
    ready_s: float = 1_800.0
    """Maximum seconds to answer the opening frame: enough to convert and load a large model from a slow disk."""
    silent_s: float = 30.0
    """Maximum seconds without any frame from the child, once it is ready."""
    silent_start_s: float = 300.0
    """Maximum seconds without any frame before the child is ready. Loading libraries and the model may block all of its
    threads.
    """
    stalled_s: float = 600.0
    """Seconds without a step while the child has work, as the child's heartbeat reports; then the child is killed."""
    beat_s: float = 2.0
    """Seconds between heartbeats. The child gets this value in its opening frame."""
    look_s: float = 1.0
    """Seconds between two checks of the child."""
    ending_s: float = ENDING_S
    """Seconds to wait for the exit after the child has closed its pipe."""


NO_HEARTBEAT: Final = ChildLimits(ready_s=math.inf, silent_s=math.inf, silent_start_s=math.inf)
"""Limits for a child without a heartbeat, which may take any time to get ready."""


class SupervisedChild:
    """A supervised child, created by `start`. After a ChildExited it is unusable: start another one."""

    def __init__(self, child: Child, command: Command, limits: ChildLimits) -> None:
        self.ready: Frame = {}
        """Answer to the opening frame; empty until it arrives."""
        self._is_ready = False
        self._child = child
        self._command = command
        self._limits = limits
        self._silent_s = 0.0
        self._look_at = 0.0
        self._used_bytes = 0
        self._kernel_kills = process_memory.kernel_kills()
        self._stopped = False
        self._suspended = False

    @classmethod
    async def start(
        cls, command: Command, opening: Mapping[str, object], limits: ChildLimits = NO_HEARTBEAT
    ) -> SupervisedChild:
        """Start the child (`spawn`) and send it the opening frame (`open`). Raises ChildExited. After an error or a
        cancellation, no process remains.
        """
        child = await cls.spawn(command, limits)
        await child.open(opening)
        return child

    @classmethod
    async def spawn(cls, command: Command, limits: ChildLimits = NO_HEARTBEAT) -> SupervisedChild:
        """Start the process, which waits for its opening frame. Raises ChildExited if the system cannot start it."""
        try:
            child = await Child.start(
                command.module,
                *command.arguments,
                name=command.name,
                log=command.log,
                env=command.env,
                ending_s=limits.ending_s,
            )
        except OSError as error:
            unstarted = ChildExited(command.name, returncode=None, log=command.log)
            raise unstarted.because(Death.UNSTARTED, "cannot be started", got=str(error)) from error
        return cls(child, command, limits)

    async def open(self, opening: Mapping[str, object]) -> None:
        """Send the opening frame and wait for `ready`. Raises ChildExited. Errors and cancellation end the child."""
        try:
            await self.send(opening)
            self.ready = await self.receive(within_s=self._limits.ready_s)
        except BaseException:
            self.kill()
            await self.stop()
            raise
        self._is_ready = True

    @property
    def pid(self) -> int:
        return self._child.pid

    async def send(self, frame: Mapping[str, object]) -> None:
        """Send a frame; wait while the pipe is full. Raises ChildExited if the child no longer reads."""
        try:
            await self._child.send(frame)
        except ChildExited as error:
            raise self._with_reason(error) from error

    async def receive(self, *, within_s: float = math.inf) -> Frame:
        """Return the next frame that is not a heartbeat. Raises ChildExited if the child ends or takes too long.

        The child is monitored only during this call. Cancel-safe, for one reader at a time.
        """
        clock = asyncio.get_running_loop().time
        waited_s = 0.0
        while True:
            await self._check_memory()
            began = clock()
            try:
                frame = await self._child.look(max(0.0, min(self._limits.look_s, within_s - waited_s)))
            except ChildExited as error:
                raise self._with_reason(error) from error
            if self._stopped:
                continue  # Read on until the end is reported: a child blocked on a full pipe cannot exit.
            if self._suspended and frame is None:
                continue
            passed_s = min(clock() - began, self._limits.look_s)
            waited_s += passed_s
            self._silent_s = 0.0 if frame is not None else self._silent_s + passed_s
            if frame is not None and frame.get("type") != ALIVE:
                return frame
            await self._check_life(frame, waited_s, within_s)

    async def _check_life(self, beat: Frame | None, waited_s: float, within_s: float) -> None:
        if beat is not None and beat["stalled_s"] > self._limits.stalled_s:
            await self._give_up(Death.STALLED, "stalled", f"no step in {beat['stalled_s']:.0f} s")
        if self._silent_s > (self._limits.silent_s if self._is_ready else self._limits.silent_start_s):
            await self._give_up(Death.SILENT, "does not answer", f"no sign of life in {self._silent_s:.0f} s")
        if waited_s >= within_s:
            did = "takes too long" if self._is_ready else "does not get ready"
            await self._give_up(Death.LATE, did, f"nothing after {within_s:g} s")

    async def _check_memory(self) -> None:
        limit, now = self._limits.memory_bytes, asyncio.get_running_loop().time()
        if self._stopped or not limit or now < self._look_at:
            return
        self._look_at = now + self._limits.look_s
        self._used_bytes = await asyncio.to_thread(process_memory.own_bytes, self.pid) or self._used_bytes
        if self._used_bytes > limit:
            figures = f"{self._used_bytes / _GIB:.2f} GiB, {limit / _GIB:.2f} GiB allowed"
            await self._give_up(Death.OUT_OF_MEMORY, "exceeded its memory limit", figures)

    async def _give_up(self, death: Death, did: str, got: str) -> NoReturn:
        self.kill()
        await self._child.stop()
        raise (await self._child.exited()).because(death, did, got=got)

    def _with_reason(self, error: ChildExited) -> ChildExited:
        """Add the reason of the child's end. SIGKILL counts as an out-of-memory kill if the kernel's count of such
        kills has changed, or is unknown.
        """
        if self._stopped:
            return error.because(Death.STOPPED, "was stopped", got=None)
        if error.death is Death.SILENT:
            return error
        if error.returncode == OUT_OF_MEMORY_STATUS:
            return error.because(Death.OUT_OF_MEMORY, "ran out of memory", got=error.got)
        denied = self._kernel_kills is not None and self._kernel_kills == process_memory.kernel_kills()
        if sys.platform == "win32" or error.returncode != -signal.SIGKILL or denied:
            return error
        held = f"it held {self._used_bytes / _GIB:.2f} GiB shortly before" if self._used_bytes else error.got
        return error.because(
            Death.OUT_OF_MEMORY, "was killed, most likely because the machine ran out of memory", got=held
        )

    def kill(self) -> None:
        """Kill the child and, on POSIX, the processes that it started. If `Command.ends_its_own`, send SIGTERM to the
        child instead.

        `stop` waits for the exit. No effect after the exit.
        """
        if self._command.ends_its_own:
            self._child.terminate()
        else:
            self._child.kill()

    def suspend(self) -> None:
        """Pause the child and the processes that it started. Until `resume`, silence is no reason to kill it."""
        self._suspended = True
        self._child.suspend()

    def resume(self) -> None:
        self._suspended = False
        self._silent_s = 0.0
        self._child.resume()

    async def stop(self, *, timeout_s: float = 10.0) -> None:
        """Close the child's input, which requests its exit, and kill it after `timeout_s` seconds. No effect after its
        exit.

        A concurrent `receive` then raises ChildExited with Death.STOPPED.
        """
        self._stopped = True
        await self._child.stop(timeout_s=timeout_s)
