"""A child process that talks over its standard streams: the learner beside the hub, the backend beside the node.

Frames are a 4-byte little-endian length and one MessagePack map; numpy arrays of any shape may stand in it. Both ends
are this project's own code on one machine, so frames are trusted. The child ends by itself when its parent dies: its
standard input then ends. Whatever the child prints goes to its log file, never into the frames; a log that has grown
beyond `LOG_BYTES` is set aside at the next start, and the one set aside before it is gone.
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
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgpack
import numpy as np

from echo_shared.errors import EchoError

Frame = dict[str, Any]
_HEADER = struct.Struct("<I")
_ARRAY = 1

LOG_BYTES: Final = 2**20
_LAST_WORDS_BYTES: Final = 4_096


def _default(value: Any) -> msgpack.ExtType:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        return msgpack.ExtType(_ARRAY, msgpack.packb((array.dtype.str, array.shape, array.tobytes())))
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


class ChildExited(EchoError):
    """The child ended. `returncode` < 0 is a signal; `last_words` the last line that it left in its log, or nothing."""

    default_code = "child_exited"

    def __init__(self, name: str, *, returncode: int, last_words: str, log: Path) -> None:
        how = describe_end(returncode)
        super().__init__(f"The {name} process ended: {how}.", got=last_words or how, do=f"More is in {log}.")
        self.returncode = returncode
        self.last_words = last_words


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


class Child:
    """The parent's end."""

    def __init__(self, process: asyncio.subprocess.Process, *, name: str, log: Path, log_begin: int) -> None:
        self._process = process
        self._name = name
        self._log = log
        self._log_begin = log_begin

    @classmethod
    async def start(cls, module: str, *, name: str, log: Path, env: Mapping[str, str] | None = None) -> Child:
        """Runs `python -m module`, its standard error appended to `log`; `env` adds to this process's environment."""
        with _open_log(log) as log_file:
            log_begin = log_file.tell()
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log_file,
                env={**os.environ, **(env or {})},
                start_new_session=True,  # Ctrl-C in a terminal is the parent's to handle.
            )
        return cls(process, name=name, log=log, log_begin=log_begin)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def send(self, frame: Mapping[str, Any]) -> None:
        """Waits while the pipe is full. Raises ChildExited when nobody reads it any more."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(pack_frame(frame))
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise await self._exited() from error

    async def receive(self) -> Frame:
        """The child's next frame. Raises ChildExited at its end. Not cancel-safe in mid-frame: use one reader task."""
        assert self._process.stdout is not None
        try:
            header = await self._process.stdout.readexactly(_HEADER.size)
            return unpack_frame(await self._process.stdout.readexactly(_HEADER.unpack(header)[0]))
        except asyncio.IncompleteReadError as error:
            raise await self._exited() from error

    async def frames(self) -> AsyncIterator[Frame]:
        """All frames until the child ends, which raises ChildExited."""
        while True:
            yield await self.receive()

    async def _exited(self) -> ChildExited:
        returncode = await self._process.wait()
        last_words = await asyncio.to_thread(self._last_words)
        return ChildExited(self._name, returncode=returncode, last_words=last_words, log=self._log)

    def _last_words(self) -> str:
        try:
            with self._log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_begin, size - _LAST_WORDS_BYTES))
                said = log.read().decode(errors="replace").split("\n")
        except OSError:
            return ""  # Somebody has deleted it: what it said is gone.
        return next((line.strip() for line in reversed(said) if line.strip()), "")

    def kill(self) -> None:
        """Ends it at once; `receive` then tells. Harmless when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self, *, timeout_s: float = 10.0) -> None:
        """Closes its input, which asks it to end; kills it after `timeout_s`. Harmless when it has ended."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._process.wait()
        finally:
            self.kill()
        await self._process.wait()


class ParentPipe:
    """The child's end, blocking. Making one takes over the standard streams: prints then go to standard error.

    A thread reads frames into a queue, so that a busy child can look for news without waiting (`poll`).
    """

    def __init__(self) -> None:
        self._input: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._output: BinaryIO = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._ended = False
        self._sending = threading.Lock()
        threading.Thread(target=self._read, name="parent-pipe", daemon=True).start()

    def _read(self) -> None:
        while len(header := self._input.read(_HEADER.size)) == _HEADER.size:
            (size,) = _HEADER.unpack(header)
            if len(body := self._input.read(size)) < size:
                break  # The parent died in mid-frame.
            self._frames.put(unpack_frame(body))
        self._frames.put(None)

    @property
    def ended(self) -> bool:
        """The parent has closed the pipe, or is gone; there will be no more frames."""
        return self._ended

    def receive(self) -> Frame | None:
        """The next frame; None once the parent has closed the pipe or is gone."""
        return None if self._ended else self._take(self._frames.get())

    def poll(self) -> Frame | None:
        """The next frame if one is there; None otherwise (look at `ended`)."""
        try:
            return None if self._ended else self._take(self._frames.get_nowait())
        except queue.Empty:
            return None

    def _take(self, frame: Frame | None) -> Frame | None:
        self._ended = frame is None
        return frame

    def send(self, frame: Mapping[str, Any]) -> None:
        """From any thread. Raises BrokenPipeError when the parent is gone."""
        packed = pack_frame(frame)
        with self._sending:
            self._output.write(packed)
            self._output.flush()
