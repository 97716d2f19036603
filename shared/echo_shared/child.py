"""A child process that talks over its standard streams, and how it ended. `echo_shared.supervised` looks after one.

Frames are a 4-byte little-endian length and one MessagePack map; numpy arrays of any shape may stand in it. Both ends
are this project's own code on one machine, so frames are trusted. The child ends by itself when its parent dies: its
standard input then ends. What it has started itself ends with it, on POSIX. Whatever the child prints goes to its log
file, never into the frames; a log that has grown beyond `LOG_BYTES` is set aside at the next start, and the one set
aside before it is gone.
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
from echo_shared.user_variables import user_variables

Frame = dict[str, Any]
_HEADER = struct.Struct("<I")
_ARRAY = 1

HEADER_BYTES: Final = _HEADER.size
"""Of what `pack_frame` makes; `unpack_frame` takes the rest."""

OUT_OF_MEMORY_STATUS: Final = 70
"""Exit status of a child that has no memory left for its work."""

LOG_BYTES: Final = 2**20
_LAST_WORDS_BYTES: Final = 4_096
PIPE_BYTES: Final = 2**20
UNSENT_BYTES: Final = 2**22
"""That wait for the child to take them before `send` waits: at once, the system takes a fraction of a large frame."""
_READ_BYTES: Final = 256 * 1024
"""At most, at once."""
ENDING_S: Final = 60.0
"""From when a child has closed its pipe until it is asked to end, and from then until it is killed."""
_LOOK_S: Final = 1.0
"""Between two looks whether a child has ended while its pipes are open: what it has started may hold them."""


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
    """Why a child is gone."""

    UNSTARTED = "unstarted"
    """The system did not start it."""
    EXITED = "exited"
    """It ended by itself, with an exit status."""
    SIGNALLED = "signalled"
    """A signal ended it: it crashed, or somebody killed it."""
    OUT_OF_MEMORY = "out_of_memory"
    """It had none left, took more than it may, or was killed for it by the system."""
    LATE = "late"
    """An answer took too long, so its parent killed it."""
    SILENT = "silent"
    """It showed no sign of life, or closed its pipe and lived on, so its parent killed it."""
    STALLED = "stalled"
    """It lived, but did not get on with its work, so its parent killed it."""
    STOPPED = "stopped"
    """Its parent stopped it."""


class ChildExited(EchoError):
    """The child is gone, for the reason `death`.

    `returncode` < 0 is a signal, None a child that never was; `last_words` the last line that it left in its log, or
    nothing.
    """

    default_code = "child_exited"

    def __init__(
        self, name: str, *, returncode: int | None, log: Path, last_words: str = "", death: Death | None = None
    ) -> None:
        how = "it never began" if returncode is None else describe_end(returncode)
        super().__init__(f"The {name} process ended: {how}.", got=last_words or how, do=f"More is in {log}.")
        self.name = name
        self.returncode = returncode
        self.last_words = last_words
        self.death = death or (Death.EXITED if (returncode or 0) >= 0 else Death.SIGNALLED)

    def because(self, death: Death, did: str, *, got: str | None) -> ChildExited:
        """The same end, told by who knows its reason: "The NAME process `did`."."""
        self.death, self.what, self.got = death, f"The {self.name} process {did}.", got
        return self


def describe_end(returncode: int) -> str:
    """For people: "killed by SIGSEGV", "exit status 3"."""
    if returncode >= 0:
        return f"exit status {returncode if returncode < 256 else hex(returncode)}"  # Windows has NTSTATUS codes.
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
    """What a child reads from, and what opens the other end once the child is there; None: the library does. Linux has
    wider pipes than by default: a loop that is busy comes to it seldom."""
    if sys.platform == "win32":
        yield asyncio.subprocess.PIPE, None
        return
    theirs, ours = os.pipe()
    file = os.fdopen(ours, "wb", buffering=0)
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError):  # A user may have so many such pages.
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
    """The parent's end."""

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
        """What it has sent, from the beginning of a frame on."""
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
        """Runs `python -m module arguments`, its standard error appended to `log`; `env` adds to this process's own.

        `ending_s`: how long it may take to end once it has closed its pipe.
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
                start_new_session=True,  # Ctrl-C in a terminal is the parent's to handle; and `kill` needs a group.
            )
            stdin = process.stdin if open_our_end is None else await open_our_end()
        assert stdin is not None
        stdin.transport.set_write_buffer_limits(high=UNSENT_BYTES)
        return cls(process, stdin, name=name, log=log, log_begin=log_begin, ending_s=ending_s)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def send(self, frame: Mapping[str, Any]) -> None:
        """Waits while the pipe is full. Raises ChildExited when nobody reads it any more."""
        try:
            self._stdin.write(pack_frame(frame))
            await self._stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise await self.exited() from error

    async def receive(self) -> Frame:
        """The child's next frame. Raises ChildExited at its end. Cancel-safe, with one reader at a time."""
        while (frame := await self.look(_LOOK_S)) is None:
            pass
        return frame

    async def look(self, within_s: float) -> Frame | None:
        """The child's next frame, or None when it sends none `within_s`. Otherwise as `receive`."""
        if (frame := self._whole_frame()) is not None:
            return frame
        try:
            async with asyncio.timeout(within_s):
                return await self._read()
        except asyncio.IncompleteReadError as error:
            raise await self.exited() from error
        except TimeoutError:
            if self._seen_ended:  # At the last look already, so all that it had sent has been read.
                raise await self.exited() from None
            self._seen_ended = self._process.returncode is not None
            return None

    async def _read(self) -> Frame:
        """Keeps its place in a frame when it is cancelled."""
        assert self._process.stdout is not None
        while (frame := self._whole_frame()) is None:
            more = await self._process.stdout.read(_READ_BYTES)
            if not more:
                raise asyncio.IncompleteReadError(bytes(self._unread), None)
            self._unread += more
        return frame

    def _whole_frame(self) -> Frame | None:
        """The first of what was read, if all of it was."""
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
        """What its end was, once it has ended; one that closed its pipe is of no more use, and is made to end."""
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
        """Its exit status, once it has ended; then nothing that it has started is left.

        `Process.wait` alone would also wait for whoever else holds its pipes, in some releases of Python
        (https://github.com/python/cpython/issues/119710).
        """
        while self._process.returncode is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._process.wait()
        self.kill()
        self._over = True  # From here on its number may be another's.
        return self._process.returncode

    def _last_words(self) -> str:
        try:
            with self._log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_begin, size - _LAST_WORDS_BYTES))
                said = log.read().decode(errors="replace").split("\n")
        except OSError:
            return ""  # Somebody has deleted it: what it said is gone.
        return next((line.strip() for line in reversed(said) if line.strip()), "")

    def suspend(self) -> None:
        """Stops it and all that it has started where they are, until `resume`; `stop` and `kill` end it even so."""
        self._suspended = True
        if sys.platform == "win32":
            for process in self._family():
                with contextlib.suppress(psutil.Error):
                    process.suspend()
        else:
            self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets what was suspended go on. Harmless when it runs, or has ended."""
        self._suspended = False
        if sys.platform == "win32":
            for process in self._family():
                with contextlib.suppress(psutil.Error):
                    process.resume()
        else:
            self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it and, on POSIX, all that it has started, at once; `receive` then tells. Harmless when it has ended."""
        if sys.platform == "win32":
            if not self._over:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
        else:
            self._signal(signal.SIGKILL)

    if sys.platform == "win32":

        def _family(self) -> list[psutil.Process]:
            """Itself first: it then starts no more of the others."""
            if self._over:
                return []
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(self.pid)
                return [process, *process.children(recursive=True)]
            return []

    else:

        def _signal(self, number: signal.Signals) -> None:
            """To it and all that it has started. Harmless when it has ended."""
            if not self._over:
                # PermissionError: what macOS says of a group in which all have ended.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, number)

    def terminate(self) -> None:
        """Asks it to end, by SIGTERM (on Windows it ends it); `stop` waits for that. Harmless when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    async def stop(self, *, timeout_s: float = 10.0) -> None:
        """Closes its input, which asks it to end; kills it after `timeout_s`. Harmless when it has ended.

        One that is suspended is killed at once.
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
    """The child's end, blocking. Making one takes over the standard streams: prints then go to standard error.

    A thread reads frames into a queue, so that a busy child can look for news without waiting (`poll`). For a child
    that has something to do before it has threads, `opening` takes the first frame, and `begin` starts that one.
    """

    def __init__(self, *, begun: bool = True) -> None:
        """`begun`: frames are read from the start."""
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
        """The first frame, before `begin`; None when the parent has closed the pipe, or is gone."""
        return self._take(self._read_one())

    def begin(self) -> None:
        """Reads from here on."""
        threading.Thread(target=self._read, name="parent-pipe", daemon=True).start()

    def _read_one(self) -> Frame | None:
        if len(header := self._input.read(_HEADER.size)) < _HEADER.size:
            return None
        (size,) = _HEADER.unpack(header)
        body = self._input.read(size)
        return None if len(body) < size else unpack_frame(body)  # Shorter where the parent died in mid-frame.

    def _read(self) -> None:
        while (frame := self._read_one()) is not None:
            self._frames.put(frame)
        self._closed = True
        self._frames.put(None)

    @property
    def closed(self) -> bool:
        """The parent has closed the pipe, or is gone, whatever frames are still unread."""
        return self._closed

    @property
    def ended(self) -> bool:
        """The parent has closed the pipe, or is gone; there will be no more frames."""
        return self._ended

    def receive(self, *, timeout_s: float | None = None) -> Frame | None:
        """The next frame; None once the parent has closed the pipe or is gone, or after `timeout_s` (see `ended`)."""
        try:
            return None if self._ended else self._take(self._frames.get(timeout=timeout_s))
        except queue.Empty:
            return None

    def poll(self) -> Frame | None:
        """The next frame if one is there; None otherwise (look at `ended`)."""
        return self.receive(timeout_s=0)

    def _take(self, frame: Frame | None) -> Frame | None:
        self._ended = frame is None
        return frame

    def send(self, frame: Mapping[str, Any]) -> None:
        """From any thread. Raises BrokenPipeError when the parent is gone."""
        packed = pack_frame(frame)
        with self._sending:
            self._output.write(packed)
            self._output.flush()
