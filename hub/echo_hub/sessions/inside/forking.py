"""Fork server of sessions: this process imports the environment's package once, and forks a child for each session.

A forked session shares the memory of what was imported, starts in milliseconds, and has random number generators of its
own. The server runs nothing of the environment itself. It has one thread, because a fork copies only one.

A session ends when the hub says so, when its process ends, and when the hub or the server ends. Then the server kills
what the session has started, writes `{"ended": CAUSE}` to the session's socket, and closes it. On Linux this includes
processes in sessions of their own, because the server and each session are subreapers (prctl(2)).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import resource
import selectors
import shutil
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn

from echo_hub.sessions.inside.calls import (
    ControlLines,
    SessionCalls,
    as_line,
    make_adapter,
    run_at_once,
    say_failed,
    say_ready,
    session_cage,
)

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_IS_LINUX: Final = sys.platform == "linux"
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_MOST_PASSES: Final = 1_000
"""Number of times that the server looks for leftover processes of an ended session before it gives up."""
OUT_OF_MEMORY_STATUS: Final = 77
"""Exit status of a session that ran out of memory."""


class _Forked:
    """One session's process, as the fork server knows it."""

    def __init__(self, pid: int, line: socket.socket, directory: str) -> None:
        self.pid = pid
        self.line = line
        self.directory = directory


class _Server:
    def __init__(self, control: socket.socket, adapter: Any, opening: dict[str, Any]) -> None:
        self._control = control
        self._adapter = adapter
        self._memory_bytes = int(opening.get("memory_mb", 0)) * 2**20
        self._lines = ControlLines()
        self._sockets: deque[socket.socket] = deque()
        self._by_number: dict[int, _Forked] = {}
        self._by_pid: dict[int, int] = {}
        self._cage = session_cage()
        self._descriptors = {control.fileno()}
        """File descriptors that no session may keep. A session closes them by number: touching the objects that own
        them would copy their memory."""

    def run(self) -> None:
        """Serve until the hub closes the control socket. No session is left afterwards."""
        wakes, woken = socket.socketpair()
        wakes.setblocking(False)
        woken.setblocking(False)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(wakes, selectors.EVENT_READ)
        self._descriptors |= {wakes.fileno(), woken.fileno(), selector.fileno()}
        try:
            while True:
                for ready, _ in selector.select():
                    if ready.fileobj is wakes:
                        with contextlib.suppress(BlockingIOError):
                            wakes.recv(4096)
                        self._reap()
                    elif not self._listen():
                        return
        finally:
            for forked in self._by_number.values():
                self._end(forked.pid)
            if self._by_pid:
                self._reap(0)

    def _listen(self) -> bool:
        """Handle what the hub has sent. Return False if the hub is gone."""
        part, descriptors, _, _ = socket.recv_fds(self._control, 65_536, 16)
        self._sockets += [socket.socket(fileno=descriptor) for descriptor in descriptors]
        self._descriptors.update(descriptors)
        if not part:
            return False
        for asked in self._lines.lines(part):
            number = asked["session"]
            if asked["do"] == "session":
                if not self._sockets:  # The limit on open files is reached. The hub sees its socket close.
                    continue
                self._fork(number, self._sockets.popleft(), asked.get("directory", ""))
            elif (forked := self._by_number.get(number)) is not None:
                if asked["do"] == "end":
                    self._end(forked.pid)
                elif asked["do"] == "cpu" and self._cage is not None:
                    self._cage.allow_cpu(forked.pid)
        return True

    def _fork(self, number: int, line: socket.socket, directory: str) -> None:
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            _refuse(line, error)
            self._close(line, "")
            return
        if pid == 0:
            self._be_session(server, line, directory)
        self._by_number[number] = _Forked(pid, line, directory)
        self._by_pid[pid] = number

    def _be_session(self, server: int, line: socket.socket, directory: str) -> NoReturn:
        """Run as the session's process until it exits."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)  # The handler of SIGCHLD stays: it does nothing.
            for descriptor in self._descriptors:
                if descriptor != line.fileno():
                    os.close(descriptor)
            os.setsid()
            if _IS_LINUX:
                _prctl(_PR_SET_CHILD_SUBREAPER, 1)
                _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == server:
                try:
                    self._confine(directory)
                except OSError as error:
                    _refuse(line, error)
                    raise
                status = _play(line, self._adapter)
        except MemoryError:
            status = OUT_OF_MEMORY_STATUS
        except BaseException:  # noqa: BLE001 - Nothing may leave the session's process.
            traceback.print_exc()
        finally:
            os._exit(status)

    def _confine(self, directory: str) -> None:
        """Restrict this process (cage, memory) before the environment reads any untrusted input."""
        if self._cage is not None:
            self._cage.enter()
            return
        if directory:
            os.mkdir(directory, 0o700)  # noqa: PTH102 - pathlib would copy much of the shared memory.
            os.chdir(directory)
        if self._memory_bytes and _IS_LINUX:
            _limit_memory(self._memory_bytes)

    def _end(self, pid: int) -> None:
        """Kill a session's process. In a cage, only the warden process (which set up the sandbox) may have the right to
        kill it."""
        if self._cage is not None:
            self._cage.end(pid)
        else:
            _kill(pid)

    def _reap(self, options: int = os.WNOHANG) -> None:
        """Finish all sessions whose processes have ended."""
        with contextlib.suppress(ChildProcessError):  # There is no child.
            while True:
                pid, status = os.waitpid(-1, options)
                if pid == 0:
                    return
                number = self._by_pid.pop(pid, None)
                if number is not None:
                    self._finish(number, pid, status)
                    if not self._by_pid:
                        return

    def _finish(self, number: int, pid: int, status: int) -> None:
        forked = self._by_number.pop(number)
        self._end_orphans(pid)
        if forked.directory and self._cage is None:
            shutil.rmtree(forked.directory, ignore_errors=True)
        cause = "" if self._cage is None else str(self._cage.cause(pid, status))
        self._close(forked.line, cause or _cause(status))

    def _close(self, line: socket.socket, cause: str) -> None:
        """Send the last line of a session, on a new line, because the session may have died in the middle of one."""
        with contextlib.suppress(OSError):  # The hub has closed its end, or does not read.
            line.setblocking(False)
            line.sendall(b"\n" + as_line({"ended": cause}))
        self._descriptors.discard(line.fileno())
        line.close()

    def _end_orphans(self, group: int) -> None:
        """Kill what the ended session has started. Its processes are now children of this process."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        if not _IS_LINUX:
            return
        for _ in range(_MOST_PASSES):
            orphans = [pid for pid in _children() if pid not in self._by_pid]
            if not orphans:
                return
            for pid in orphans:
                self._end(pid)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)


def _refuse(line: socket.socket, error: OSError) -> None:
    """Tell the hub that the system cannot start a session now. The episode is not at fault."""
    with contextlib.suppress(OSError):  # The hub has closed its end.
        line.sendall(as_line({"error": f"A session cannot be started: {error}", "code": "environment_away"}))


def _play(line: socket.socket, adapter: Any) -> int:
    """Answer the calls of one session until its socket closes. Return the exit status."""
    calls = SessionCalls(adapter)
    run: Callable[[Coroutine[Any, Any, Any]], Any]
    run = run_at_once if getattr(adapter, "is_sync", False) else asyncio.new_event_loop().run_until_complete
    # line.makefile() would run more Python functions, and so copy more memory.
    with open(line.fileno(), "rb", closefd=False) as asked:
        for each in asked:
            line.sendall(run(calls.answer(each)))
    run(calls.close())
    return 0


def _limit_memory(allowed: int) -> None:
    used = int(_read("/proc/self/statm").split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + allowed if hard == resource.RLIM_INFINITY else min(used + allowed, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _children() -> list[int]:
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208 - pathlib would copy much of the shared memory.
        with contextlib.suppress(OSError):
            found += map(int, _read(f"/proc/self/task/{task}/children").split())
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 65_536)
    finally:
        os.close(descriptor)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _cause(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code == OUT_OF_MEMORY_STATUS:
        return "The session ran out of memory."
    if code < 0:
        return f"The session's process was ended by signal {-code} ({signal.Signals(-code).name})."
    return f"The session's process ended with status {code}."


def serve(control: socket.socket, adapter_name: str, opening: dict[str, Any]) -> None:
    """Make the adapter, and fork a session for each line of the control socket, until that closes."""
    try:
        adapter = make_adapter(adapter_name, opening)
    except Exception as error:  # noqa: BLE001 - An import may raise any exception. The operator sees it.
        say_failed(control, error)
        return
    if _IS_LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # Each session has a socket here.
    gc.collect()
    gc.freeze()  # Keeps the collector from touching, and so copying, the pages that sessions share.
    say_ready(control)
    _Server(control, adapter, opening).run()
