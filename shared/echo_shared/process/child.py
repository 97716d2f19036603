"""A child process that exchanges frames with its parent over standard input and output.

A frame is a 4-byte little-endian length and one MessagePack map, which may contain numpy arrays of any shape. Both ends
run this project's code on one machine, so frames are trusted. The child exits when its parent dies, because its
standard input ends; on POSIX, the processes that it started end with it. The child's prints go to its log file, never
into the frames.

At the next start, a log larger than `LOG_BYTES` is renamed; it replaces the one renamed before.
`echo_shared.process.supervised` monitors a child.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import struct
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgpack
import numpy as np
import psutil

from echo_shared.errors import EchoError
from echo_shared.process.user_variables import user_variables

Frame = dict[str, Any]
_HEADER = struct.Struct("<I")
_ARRAY = 1

HEADER_BYTES: Final = _HEADER.size

OUT_OF_MEMORY_STATUS: Final = 70
"""Exit status of a child that ran out of memory."""

LOG_BYTES: Final = 2**20
_LAST_WORDS_BYTES: Final = 4_096
PIPE_BYTES: Final = 2**20
UNSENT_BYTES: Final = 2**22
"""Bytes buffered in this process before `send` waits. A pipe holds only a part of a large frame."""
_READ_BYTES: Final = 256 * 1024
ENDING_S: Final = 60.0
"""Seconds to wait for the exit of a child that closed its pipe: first before SIGTERM, and again before SIGKILL."""
_LOOK_S: Final = 1.0
"""Seconds between two checks for the child's exit. A closed pipe does not prove that the child runs or has ended:
processes that it started may keep the pipe open.
"""


def _default(value: Any) -> msgpack.ExtType:
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(_ARRAY, msgpack.packb((value.dtype.str, value.shape, value.tobytes())))
    if isinstance(value, np.generic):
        return _default(np.asarray(value))
    raise TypeError(f"{type(value).__name__} cannot travel in a frame")


def _ext_hook(code: int, data: bytes) -> Any:
    if code != _ARRAY:
        raise ValueError(f"unknown extension type {code}")
    dtype, shape, raw = msgpack.unpackb(data)
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


def pack_frame(frame: Mapping[str, Any]) -> bytes:
    body: bytes = msgpack.packb(frame, default=_default, use_bin_type=True)
    return _HEADER.pack(len(body)) + body


def unpack_frame(body: bytes) -> Frame:
    frame: Frame = msgpack.unpackb(body, ext_hook=_ext_hook, raw=False, strict_map_key=False)
    return frame


class Death(StrEnum):
    UNSTARTED = "unstarted"
    """The system did not start the process."""
    EXITED = "exited"
    """The process exited by itself, with an exit status."""
    SIGNALLED = "signalled"
    """A signal ended the process: a crash, or a kill by another process."""
    OUT_OF_MEMORY = "out_of_memory"
    """The process ran out of memory, exceeded its limit, or was killed by the kernel for its memory use."""
    LATE = "late"
    """The process took too long to answer, so the parent killed it."""
    SILENT = "silent"
    """The process sent no sign of life, or closed its pipe without exiting, so the parent killed it."""
    STALLED = "stalled"
    """The process was alive but made no progress, so the parent killed it."""
    STOPPED = "stopped"
    """The parent stopped the process."""


class ChildExited(EchoError):
    """The child ended, for the reason `death`.

    `returncode` < 0 is a signal, None a child that never started; `last_words` is the last line of its log, or "".
    """

    default_code = "child_exited"

    def __init__(
        self, name: str, *, returncode: int | None, log: Path, last_words: str = "", death: Death | None = None
    ) -> None:
        how = "it never started" if returncode is None else describe_end(returncode)
        super().__init__(f"The {name} process ended: {how}.", got=last_words or how, do=f"More is in {log}.")
        self.name = name
        self.returncode = returncode
        self.last_words = last_words
        self.death = death or (Death.EXITED if (returncode or 0) >= 0 else Death.SIGNALLED)

    def because(self, death: Death, did: str, *, got: str | None) -> ChildExited:
        """Set the reason `death` and the text "The NAME process `did`.", and return self."""
        self.death, self.what, self.got = death, f"The {self.name} process {did}.", got
        return self


def describe_end(returncode: int) -> str:
    """Return a text such as "killed by SIGSEGV" or "exit status 3"."""
    if returncode >= 0:
        # On Windows, an exit status may be an NTSTATUS code, which is shown in hexadecimal.
        return f"exit status {returncode if returncode < 256 else hex(returncode)}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def _open_log(log: Path) -> BinaryIO:
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > LOG_BYTES:
        log.replace(log.with_name(log.name + ".old"))
    return log.open("ab")


OpenEnd = Callable[[], Awaitable[asyncio.StreamWriter]]


@contextlib.contextmanager
def _wide_pipe() -> Iterator[tuple[int, OpenEnd | None]]:
    """Yield the child's stdin and a function that opens the parent's end, None if asyncio opens it.

    On Linux the pipe is enlarged: a busy event loop seldom gets to refill a small one.
    """
    if sys.platform == "win32":
        yield asyncio.subprocess.PIPE, None
        return
    theirs, ours = os.pipe()
    file = os.fdopen(ours, "wb", buffering=0)
    if sys.platform == "linux":
        import fcntl

        # Enlarging may fail, because the kernel limits the pipe memory of each user.
        with contextlib.suppress(OSError):
            fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    async def open_end() -> asyncio.StreamWriter:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, file)
        return asyncio.StreamWriter(transport, protocol, None, loop)

    try:
        yield theirs, open_end
    except BaseException:
        file.close()
        raise
    finally:
        os.close(theirs)


class Child:
    """The parent's end of the pipes to one child process: it sends and receives frames, and ends the child."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        stdin: asyncio.StreamWriter,
        *,
        name: str,
        log: Path,
        log_begin: int,
        ending_s: float,
    ) -> None:
        self._process = process
        self._stdin = stdin
        self._ending_s = ending_s
        self._name = name
        self._log = log
        self._log_begin = log_begin
        self._unread = bytearray()
        """Received bytes that were not returned yet, starting at the beginning of a frame."""
        self._seen_ended = False
        self._over = False
        self._suspended = False

    @classmethod
    async def start(
        cls,
        module: str,
        *arguments: str,
        name: str,
        log: Path,
        env: Mapping[str, str] | None = None,
        ending_s: float = ENDING_S,
    ) -> Child:
        """Run `python -m module arguments` with standard error appended to `log`; `env` extends the environment.

        `ending_s`: seconds to wait for the exit after the child has closed its pipe.
        """
        with _open_log(log) as log_file, _wide_pipe() as (their_end, open_our_end):
            log_begin = log_file.tell()
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                *arguments,
                stdin=their_end,
                stdout=asyncio.subprocess.PIPE,
                stderr=log_file,
                env={**os.environ, **user_variables(), **(env or {})},
                # With its own session, the child gets no Ctrl-C, which the parent handles, and `kill` can end its
                # process group.
                start_new_session=True,
            )
            try:
                stdin = process.stdin if open_our_end is None else await open_our_end()
            except BaseException:
                process.kill()
                await process.communicate()
                raise
        assert stdin is not None
        stdin.transport.set_write_buffer_limits(high=UNSENT_BYTES)
        return cls(process, stdin, name=name, log=log, log_begin=log_begin, ending_s=ending_s)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def send(self, frame: Mapping[str, Any]) -> None:
        """Send a frame; wait while the pipe is full. Raises ChildExited if the child no longer reads."""
        try:
            self._stdin.write(pack_frame(frame))
            await self._stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise await self.exited() from error

    async def receive(self) -> Frame:
        """Return the child's next frame. Raises ChildExited when the child has ended. Cancel-safe, for one reader at a
        time.
        """
        while (frame := await self.look(_LOOK_S)) is None:
            pass
        return frame

    async def look(self, within_s: float) -> Frame | None:
        """Like `receive`, but return None if no frame arrives within `within_s` seconds."""
        if (frame := self._whole_frame()) is not None:
            return frame
        try:
            async with asyncio.timeout(within_s):
                return await self._read()
        except asyncio.IncompleteReadError as error:
            raise await self.exited() from error
        except TimeoutError:
            if self._seen_ended:  # The child exited before this wait: no frame is left unread.
                raise await self.exited() from None
            self._seen_ended = self._process.returncode is not None
            return None

    async def _read(self) -> Frame:
        """Read the next frame. A cancelled read keeps the bytes received."""
        assert self._process.stdout is not None
        while (frame := self._whole_frame()) is None:
            more = await self._process.stdout.read(_READ_BYTES)
            if not more:
                raise asyncio.IncompleteReadError(bytes(self._unread), None)
            self._unread += more
        return frame

    def _whole_frame(self) -> Frame | None:
        """Remove and return the first received frame, if it is complete."""
        if len(self._unread) < HEADER_BYTES:
            return None
        end = HEADER_BYTES + _HEADER.unpack_from(self._unread)[0]
        if len(self._unread) < end:
            return None
        with memoryview(self._unread) as unread:
            body = bytes(unread[HEADER_BYTES:end])
        del self._unread[:end]
        return unpack_frame(body)

    async def exited(self) -> ChildExited:
        """Wait for the child's exit and return the ChildExited to raise. End a child that closed its pipe but still
        runs.
        """
        lived_on = False
        for make_end in (self.terminate, self.kill):
            try:
                async with asyncio.timeout(self._ending_s):
                    await self._end()
                break
            except TimeoutError:
                lived_on = True
                make_end()
        returncode = await self._end()
        last_words = await asyncio.to_thread(self._last_words)
        ended = ChildExited(self._name, returncode=returncode, last_words=last_words, log=self._log)
        if lived_on:
            ended.because(Death.SILENT, "did not end", got=f"lived on for {self._ending_s:g} s with its pipe closed")
        return ended

    async def _end(self) -> int:
        """Wait for the exit, kill the processes that the child started, and return the exit status.

        In some Python releases, `Process.wait` alone also waits for other processes that hold the child's pipes
        (https://github.com/python/cpython/issues/119710).
        """
        while self._process.returncode is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._process.wait()
        self.kill()
        self._over = True  # From now on, no signal may be sent: the system may give the process id to another process.
        return self._process.returncode

    def _last_words(self) -> str:
        try:
            with self._log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_begin, size - _LAST_WORDS_BYTES))
                said = log.read().decode(errors="replace").split("\n")
        except OSError:
            return ""  # The log was deleted.
        return next((line.strip() for line in reversed(said) if line.strip()), "")

    def suspend(self) -> None:
        """Pause the child and the processes that it started until `resume`; `stop` and `kill` still end them."""
        self._suspended = True
        if sys.platform == "win32":
            for process in self._family():
                with contextlib.suppress(psutil.Error):
                    process.suspend()
        else:
            self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._suspended = False
        if sys.platform == "win32":
            for process in self._family():
                with contextlib.suppress(psutil.Error):
                    process.resume()
        else:
            self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the child and, on POSIX, the processes that it started. No effect after its exit."""
        if sys.platform == "win32":
            if not self._over:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
        else:
            self._signal(signal.SIGKILL)

    if sys.platform == "win32":

        def _family(self) -> list[psutil.Process]:
            """Return the child, then its descendants. The child is suspended first, so that it cannot start more
            processes.
            """
            if self._over:
                return []
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(self.pid)
                return [process, *process.children(recursive=True)]
            return []

    else:

        def _signal(self, number: signal.Signals) -> None:
            if not self._over:
                # On macOS, a process group whose processes have all exited gives PermissionError.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, number)

    def terminate(self) -> None:
        """Request the exit with SIGTERM (on Windows this kills); `stop` waits for it. No effect after exit."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    async def stop(self, *, timeout_s: float = 10.0) -> None:
        """Close the child's input, which requests its exit, and kill it after `timeout_s`. No effect after exit.

        A suspended child is killed at once.
        """
        self._stdin.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.0 if self._suspended else timeout_s):
                    await self._end()
        finally:
            self.kill()
        await self._end()


class ParentPipe:
    """The child's end of the pipes, blocking. Its constructor redirects standard output to standard error.

    A thread reads frames into a queue, so that a busy child can check for frames without waiting (`poll`). A child that
    must work before it starts threads passes `begun=False`, reads the first frame with `opening`, then calls `begin`.
    """

    def __init__(self, *, begun: bool = True) -> None:
        """`begun`: True starts the thread that reads frames at once; False leaves that to `begin`."""
        self._input: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._output: BinaryIO = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._closed = False
        self._ended = False
        self._sending = threading.Lock()
        if begun:
            self.begin()

    def opening(self) -> Frame | None:
        """Return the first frame without the reading thread; None if the parent has closed the pipe or died."""
        return self._take(self._read_one())

    def begin(self) -> None:
        threading.Thread(target=self._read, name="parent-pipe", daemon=True).start()

    def _read_one(self) -> Frame | None:
        if len(header := self._input.read(_HEADER.size)) < _HEADER.size:
            return None
        (size,) = _HEADER.unpack(header)
        body = self._input.read(size)
        # The body is incomplete if the parent died while it sent the frame.
        return None if len(body) < size else unpack_frame(body)

    def _read(self) -> None:
        while (frame := self._read_one()) is not None:
            self._frames.put(frame)
        self._closed = True
        self._frames.put(None)

    @property
    def closed(self) -> bool:
        """True once the parent has closed the pipe or died, even if frames are unread."""
        return self._closed

    @property
    def ended(self) -> bool:
        """True once the parent has closed the pipe or died and all frames were read."""
        return self._ended

    def receive(self, *, timeout_s: float | None = None) -> Frame | None:
        """Return the next frame; None at the end of all frames (`ended`) or after `timeout_s` seconds."""
        try:
            return None if self._ended else self._take(self._frames.get(timeout=timeout_s))
        except queue.Empty:
            return None

    def poll(self) -> Frame | None:
        """Return the next frame if one has arrived; otherwise None (check `ended`)."""
        return self.receive(timeout_s=0)

    def _take(self, frame: Frame | None) -> Frame | None:
        self._ended = frame is None
        return frame

    def send(self, frame: Mapping[str, Any]) -> None:
        """Send a frame, from any thread. Raises BrokenPipeError if the parent is gone."""
        packed = pack_frame(frame)
        with self._sending:
            self._output.write(packed)
            self._output.flush()
