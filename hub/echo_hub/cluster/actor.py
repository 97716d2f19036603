"""A Ray actor that supervises one child process at a time on its machine, as a hub does for local children.

`echo_hub.cluster.driver` creates the actor and polls it constantly (`answers`). So driver and actor notice each other's
end within seconds. If an actor dies, its child ends too, and the hub requests the unfinished work elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import psutil

from echo_hub.cluster.parcel import MOST_BYTES, lacking, source_hash, unpack
from echo_shared.process.child import HEADER_BYTES, ChildExited, pack_frame, unpack_frame
from echo_shared.process.supervised import NO_HEARTBEAT, Command, SupervisedChild

POLL_S: Final = 5.0
"""Longest time in seconds that `answers` waits for news of the child. After that, it returns without news."""
GATHER_S: Final = 0.01
"""Seconds for which the child's answers are collected into one reply. Each reply costs a call in the cluster."""
LOG_PART_BYTES: Final = 2**16
"""Maximum number of bytes of the child's output in one reply."""
_PREFIX: Final = "echo-ray-"


class ChildHost:
    """The Ray actor that runs a child process on another machine. Only the driver calls its methods."""

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._env: dict[str, str] = {}
        self._hosted: _Hosted | None = None

    async def prepare(self, parcel: bytes, expected_source: str, lies_there: Mapping[str, int]) -> str:
        """Check this machine, unpack the files that a child process needs, and change into their directory. Return the
        reason of a failure, or "" after success.

        `lies_there` maps files that this machine must already have to their sizes.
        """
        if sys.platform != "linux":
            return f"{socket.gethostname()} runs {sys.platform}: machines for a hub's processes have to run Linux."
        if await asyncio.to_thread(source_hash) != expected_source:
            return (
                f"{socket.gethostname()} has another version of Echo than the hub: install the same one there, and "
                "start its part of the cluster again."
            )
        if missing := await asyncio.to_thread(lacking, lies_there):
            return (
                f"{socket.gethostname()} lacks {missing}, or has another file there: a base model of more than "
                f"{MOST_BYTES // 2**20} MiB is not sent, and has to lie under the same path on each machine."
            )
        _sweep()
        self._directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        packed = self._directory / "parcel.zip"
        await asyncio.to_thread(packed.write_bytes, parcel)
        self._env = await asyncio.to_thread(unpack, packed, self._directory)
        packed.unlink()
        os.chdir(self._directory / "work")
        return ""

    async def begin(self, child_id: int, spec: dict[str, Any], opening: bytes) -> None:
        """Start a child, after ending any other child. `answers` reports when it is ready."""
        assert self._directory is not None
        await asyncio.to_thread(shutil.rmtree, self._directory / SENT, ignore_errors=True)
        await self._end()
        command = Command(
            module=spec["module"],
            arguments=tuple(str(os.getpid()) if one == PID else one for one in spec["arguments"]),
            name=spec["name"],
            log=self._directory / f"child-{child_id}.log",
            env={**spec["env"], **self._env},
            ends_its_own=spec["ends_its_own"],
        )
        self._hosted = _Hosted(child_id, command, spec)
        self._hosted.work = asyncio.create_task(self._hosted.run(opening))

    async def send(
        self, child_id: int, number: int, frame: bytes, files: Mapping[str, bytes], dropped: Sequence[str]
    ) -> None:
        """Pass frame `number` (0 is the first) to the child. Do nothing if that child is gone.

        Before that, write `files` under their names to the directory `SENT`, and delete the `dropped` directories
        there.
        """
        hosted = self._hosted
        if hosted is None or hosted.child_id != child_id:
            return
        assert self._directory is not None
        try:
            if files or dropped:
                await asyncio.to_thread(_place, self._directory / SENT, files, dropped)
        except OSError as error:
            hosted.fail(error)
        else:
            hosted.came(number, frame)

    async def answers(self, child_id: int) -> dict[str, Any]:
        """Return the news of the child since the last call: its answers (`frames`), its output (`log`), and how it
        ended (`exited`; None while it runs)."""
        hosted = self._hosted
        if hosted is None or hosted.child_id != child_id:
            raise LookupError(f"there is no child {child_id}")
        return await hosted.answers()

    async def end(self, child_id: int) -> None:
        if self._hosted is not None and self._hosted.child_id == child_id:
            await self._end()

    async def close(self) -> None:
        """End the child, and delete all files of this actor."""
        await self._end()
        if self._directory is not None:
            os.chdir(tempfile.gettempdir())
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    async def _end(self) -> None:
        hosted, self._hosted = self._hosted, None
        if hosted is not None and hosted.work is not None:
            hosted.work.cancel()
            await asyncio.wait([hosted.work])
            hosted.command.log.unlink(missing_ok=True)


SENT: Final = "sent"
"""Directory for files that came with frames. It is next to the child's working directory."""
PID: Final = "{pid}"
"""Placeholder in a command's arguments that stands for the actor's process id."""


class _Hosted:
    """A child of the actor, with its incoming and outgoing frames."""

    def __init__(self, child_id: int, command: Command, spec: dict[str, Any]) -> None:
        self.child_id = child_id
        self.command = command
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()
        self._early: dict[int, bytes] = {}
        """Frames, by number, that wait for a frame with a lower number. Ray may deliver calls to this kind of actor out
        of order."""
        self._num_came = 0
        self.work: asyncio.Task[None] | None = None
        self._spec = spec
        self._expected = 0
        """Number of answers that the child has not given yet."""
        self._some_expected = asyncio.Event()
        self._found: list[bytes] = []
        self._exited: dict[str, Any] | None = None
        self._news = asyncio.Event()
        self._log_at = 0

    async def run(self, opening: bytes) -> None:
        child: SupervisedChild | None = None
        try:
            limits = replace(NO_HEARTBEAT, ending_s=self._spec["ending_s"])
            child = await SupervisedChild.spawn(self.command, limits)
            await child.open(unpack_frame(opening[HEADER_BYTES:]))
            self._tell(child.ready)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send(child))
                tasks.create_task(self._receive(child))
        except* ChildExited as group:
            self._exited = _told(_first(group))
            self._news.set()
        except* Exception as group:  # noqa: BLE001
            # Nothing above this task handles errors: pass them to the caller of `answers`.
            self.fail(_first(group))
        finally:
            if child is not None:
                child.kill()
                await child.stop()

    def fail(self, error: BaseException) -> None:
        self._exited = {"failed": repr(error)}
        self._news.set()

    def came(self, number: int, frame: bytes) -> None:
        self._early[number] = frame
        while (following := self._early.pop(self._num_came, None)) is not None:
            self._frames.put_nowait(following)
            self._num_came += 1

    async def _send(self, child: SupervisedChild) -> None:
        while True:
            frame = unpack_frame((await self._frames.get())[HEADER_BYTES:])
            self._expected += len(frame[self._spec["counted"]])
            self._some_expected.set()
            with contextlib.suppress(ChildExited):  # `_receive` reports the child's end, after all earlier answers.
                await child.send(frame)

    async def _receive(self, child: SupervisedChild) -> None:
        while True:
            await self._some_expected.wait()
            self._tell(await child.receive(within_s=self._spec["answer_s"]))
            self._expected -= 1
            if not self._expected:
                self._some_expected.clear()

    def _tell(self, frame: dict[str, Any]) -> None:
        self._found.append(pack_frame(frame))
        self._news.set()

    async def answers(self) -> dict[str, Any]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await self._news.wait()
                if self._exited is None:
                    await asyncio.sleep(GATHER_S)
        self._news.clear()
        found, self._found = self._found, []
        if self._exited is not None:
            self._news.set()  # From now on, let every call of `answers` return at once.
        return {"frames": found, "log": self._printed(), "exited": self._exited}

    def _printed(self) -> bytes:
        with contextlib.suppress(FileNotFoundError), self.command.log.open("rb") as log:
            log.seek(self._log_at)
            printed = log.read(LOG_PART_BYTES)
            self._log_at += len(printed)
            return printed
        return b""


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _told(error: BaseException) -> dict[str, Any]:
    assert isinstance(error, ChildExited)
    return {
        "returncode": error.returncode,
        "last_words": error.last_words,
        "death": str(error.death),
        "what": error.what,
        "got": error.got,
    }


def _place(directory: Path, files: Mapping[str, bytes], dropped: Sequence[str]) -> None:
    for name in dropped:
        shutil.rmtree(directory / name, ignore_errors=True)
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


def _sweep() -> None:
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = left.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)) and left.lstat().st_uid == os.getuid():
            shutil.rmtree(left, ignore_errors=True)
