"""A child process that is looked after: started, ready, alive, within its memory, ended, and every end with its reason.

    child = await SupervisedChild.start(Command("package.module", name="verifying", log=log), {"base": "..."})
    child.ready                                   what it answered to the opening frame
    await child.send({"call": 1})
    answer = await child.receive(within_s=60.0)   ChildExited when it is gone, whatever took it
    await child.stop()

The child takes the opening frame from its `ParentPipe`, holds a `heartbeat.Heartbeat` around all it does, and answers.
Whether and when the next one is started, its owner decides (`backoff.Restarts`). The engine, the learner and the
scorers are such children.

Time is counted in looks at the child, none longer than `look_s`: a machine that slept has not made its child silent.
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

from echo_shared import process_memory
from echo_shared.child import ENDING_S, OUT_OF_MEMORY_STATUS, Child, ChildExited, Death, Frame
from echo_shared.heartbeat import ALIVE

_GIB: Final = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Which process: `python -m module arguments`, its standard error appended to `log`."""

    module: str
    arguments: tuple[str, ...] = ()
    name: str
    """As in "The NAME process ended"."""
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's own."""
    ends_its_own: bool = False
    """It ends by SIGTERM, and first what it has started in sessions of their own: killed, it could not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a child is given up. Made for one with a heartbeat; see NO_HEARTBEAT."""

    memory_bytes: int = 0
    """Of its own, model files mapped into it not counted; 0 = no limit."""
    ready_s: float = 1_800.0
    """Until it answers the opening frame: enough to convert and load a large model from a slow disk."""
    silent_s: float = 30.0
    """Without any frame."""
    silent_start_s: float = 300.0
    """As silent_s, until it is ready: loading libraries and the model may hold up all of its threads."""
    stalled_s: float = 600.0
    """Without one step, by its heartbeat, while it has work."""
    beat_s: float = 2.0
    """Between two signs of life; its owner tells the child in the opening frame."""
    look_s: float = 1.0
    """Between two looks at it."""
    ending_s: float = ENDING_S
    """Until it ends, once it has closed its pipe."""


NO_HEARTBEAT: Final = Limits(ready_s=math.inf, silent_s=math.inf, silent_start_s=math.inf)
"""For a child that sends nothing but answers, and may take its time to be ready."""


class SupervisedChild:
    """Made by `start`. After a ChildExited it is of no more use: start another."""

    def __init__(self, child: Child, command: Command, limits: Limits) -> None:
        self.ready: Frame = {}
        """What it answered to the opening frame, once it has."""
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
        cls, command: Command, opening: Mapping[str, object], limits: Limits = NO_HEARTBEAT
    ) -> SupervisedChild:
        """`spawn` and `open` in one. Raises ChildExited; then, or cancelled, none is left."""
        child = await cls.spawn(command, limits)
        await child.open(opening)
        return child

    @classmethod
    async def spawn(cls, command: Command, limits: Limits = NO_HEARTBEAT) -> SupervisedChild:
        """The process, which waits for its opening frame. Raises ChildExited when the system does not start it."""
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
        """Sends the opening frame and waits for the answer: `ready`. Raises ChildExited; also cancelled, it ends it."""
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
        """Waits while the pipe is full. Raises ChildExited when nobody reads it any more."""
        try:
            await self._child.send(frame)
        except ChildExited as error:
            raise self._with_reason(error) from error

    async def receive(self, *, within_s: float = math.inf) -> Frame:
        """The next frame that is no sign of life. Raises ChildExited when it is gone, or when it takes too long.

        The child is looked after only while somebody waits here. Cancel-safe, with one reader at a time.
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
                continue  # Read on, for it may wait at a full pipe, until its end is told.
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
            await self._give_up(Death.OUT_OF_MEMORY, "took more memory than it may", figures)

    async def _give_up(self, death: Death, did: str, got: str) -> NoReturn:
        self.kill()
        await self._child.stop()
        raise (await self._child.exited()).because(death, did, got=got)

    def _with_reason(self, error: ChildExited) -> ChildExited:
        """Kills that are ours do not come here: a SIGKILL is the kernel's, for memory, unless it denies it."""
        if self._stopped:
            return error.because(Death.STOPPED, "was stopped", got=None)
        if error.death is Death.SILENT:
            return error
        if error.returncode == OUT_OF_MEMORY_STATUS:
            return error.because(Death.OUT_OF_MEMORY, "had no memory left", got=error.got)
        denied = self._kernel_kills is not None and self._kernel_kills == process_memory.kernel_kills()
        if sys.platform == "win32" or error.returncode != -signal.SIGKILL or denied:
            return error
        held = f"it held {self._used_bytes / _GIB:.2f} GiB shortly before" if self._used_bytes else error.got
        return error.because(
            Death.OUT_OF_MEMORY, "was killed, most likely because the machine ran out of memory", got=held
        )

    def kill(self) -> None:
        """Ends it and, on POSIX, all that it has started, at once; see `Command.ends_its_own`. `stop` waits for that.

        Harmless when it has ended.
        """
        if self._command.ends_its_own:
            self._child.terminate()
        else:
            self._child.kill()

    def suspend(self) -> None:
        """Stops it where it is, and all that it has started; it is not expected to say anything until `resume`."""
        self._suspended = True
        self._child.suspend()

    def resume(self) -> None:
        """Lets it go on. Harmless when it is not suspended, or has ended."""
        self._suspended = False
        self._silent_s = 0.0
        self._child.resume()

    async def stop(self, *, timeout_s: float = 10.0) -> None:
        """Closes its input, which asks it to end; kills it after `timeout_s`. Harmless when it has ended.

        Who waits in `receive` is told that it was stopped.
        """
        self._stopped = True
        await self._child.stop(timeout_s=timeout_s)
