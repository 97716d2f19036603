"""Decides about system calls of caged processes that may start programs: new processes, sockets, and modes of files.

The filter of `session_calls` asks the warden about each such call, while the caller waits. A filter cannot read the
address that a call points to. If the warden only read the address and let the call continue, another thread could
change the address meanwhile. So the warden copies the address, takes the caller's socket, and makes the call itself.

Connections go to loopback only: to sockets of the same server's processes, and to ports in the settings. Sockets
listen on loopback only, whatever address the caller names.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from echo_shared.cage import descent, session_calls, tracing
from echo_shared.cage.listening_ports import listening_inodes
from echo_shared.cage.session_terms import SessionTerms
from echo_shared.cage.supervised_files import FILE_CALLS, CallerFiles

_LONGEST_ADDRESS: Final = 128
_FIRST_FREE_PORT: Final = 1024
_MOST_OF_A_SERVER: Final = 4096
"""Maximum number of processes and threads of a server and all its sessions together."""
_LOOPBACK: Final = {socket.AF_INET: bytes((127, 0, 0, 1)), socket.AF_INET6: bytes(15) + b"\1"}


class SessionEnder(Protocol):
    """Interface to find and end sessions. The warden implements it."""

    def session_of(self, pid: int) -> int: ...
    def processes(self, pid: int) -> list[int]: ...
    def end(self, pid: int, cause: str) -> None: ...


class CallSupervisor:
    """Decides about system calls of the process `server` and of its descendants, and answers the callers."""

    def __init__(self, server: int, listener: int, terms: SessionTerms) -> None:
        """`listener`: the filter's descriptor, by its number in the server's process. Raises OSError if tracing is
        forbidden.
        """
        self._server = server
        self._terms = terms
        self._names = {number: name for name, number in session_calls.numbers(platform.machine()).items()}
        self._files = CallerFiles(terms.directory)
        self._own_ports: dict[int, int] = {}
        """TCP port -> inode of the socket that a process of the server has bound to the port."""
        child = os.pidfd_open(server)
        try:
            self.listener = tracing.take(child, listener)
        finally:
            os.close(child)

    def answer(self, ender: SessionEnder) -> None:
        """Answer one system call whose caller waits."""
        notice = bytearray(tracing.NOTICE.size)
        try:
            fcntl.ioctl(self.listener, tracing.RECEIVE, notice, True)
        except FileNotFoundError:
            return  # The thread was killed during the call.
        number, thread, _, call, _, _, *arguments = tracing.NOTICE.unpack(notice)
        name = self._names.get(call, "")
        if name in ("clone", "fork", "vfork"):
            flags = arguments[0] if name == "clone" else 0
            error = errno.EPERM if flags & session_calls.FORBIDDEN_FLAGS else self._start(thread, ender)
            self._say(number, error, go_on=True)
            return
        if name in session_calls.SCHEDULING:
            self._say(number, self._schedule(thread, arguments[0] & 0xFFFFFFFF, ender), go_on=True)
            return
        # Run the call in a thread: it may block, but the warden must keep running.
        threading.Thread(target=self._make, args=(number, thread, name, arguments), daemon=True).start()

    def _start(self, thread: int, ender: SessionEnder) -> int:
        """Return the errno for a call that starts a process; 0 allows the call. End a session that has too many
        processes.
        """
        try:
            first = ender.session_of(_process_of(thread))
        except (ProcessLookupError, FileNotFoundError):
            return errno.EAGAIN
        if first < 0:
            return errno.EAGAIN  # The process belongs to no session, so the warden will end it.
        most = self._terms.processes if first else _MOST_OF_A_SERVER
        pids = ender.processes(first) if first else descent.descendants(self._server)
        count = sum(found.threads for one in pids if (found := descent.figures(one)) is not None)
        if count < most:
            return 0
        if first:
            ender.end(first, f"processes: it had {count} processes and threads, and started another")
        return errno.EAGAIN

    def _schedule(self, thread: int, target: int, ender: SessionEnder) -> int:
        """Decide whether `thread` may change how the thread `target` is scheduled. Return 0 if both belong to one
        session, else the errno for the caller.
        """
        try:
            session = ender.session_of(_process_of(thread))
            same = session >= 0 and session == ender.session_of(_process_of(target))
        except (ProcessLookupError, FileNotFoundError):
            return errno.ESRCH
        return 0 if same else errno.EPERM

    def _make(self, number: int, thread: int, name: str, arguments: list[int]) -> None:
        """Make the system call in place of the caller, on the caller's socket, and answer with its result."""
        error = errno.EPERM
        with suppress(ProcessLookupError, FileNotFoundError):
            try:
                if name in FILE_CALLS:
                    error = self._files.make(name, thread, arguments)
                else:
                    error = self._on_socket(number, thread, name, arguments)
            except OSError as failed:
                error = failed.errno or errno.EPERM
        self._say(number, error)

    def _on_socket(self, number: int, thread: int, name: str, arguments: list[int]) -> int:
        process = _process_of(thread)
        raw = b"" if name == "listen" else tracing.memory(thread, arguments[1], min(arguments[2], _LONGEST_ADDRESS))
        child = os.pidfd_open(process)
        try:
            taken = tracing.take(child, arguments[0] & 0xFFFFFFFF)
        finally:
            os.close(child)
        try:
            if not self._waits(number):
                return errno.EINTR
            calls: Mapping[str, Callable[[int, int, bytes], int]] = {"connect": self._connect, "bind": self._bind}
            if name in calls:
                return calls[name](taken, thread, raw)
            return self._listen(taken, arguments[1])
        finally:
            os.close(taken)

    def _connect(self, taken: int, thread: int, raw: bytes) -> int:
        family = _family(raw)
        if family == socket.AF_UNIX:
            with self._files.opened(str(_place(thread, raw))) as opened:
                return _call("connect", taken, _unix(f"/proc/self/fd/{opened}"))
        if family not in _LOOPBACK or not _is_loopback(family, raw):
            return errno.ENETUNREACH
        port = int.from_bytes(raw[2:4], "big")
        if port not in self._terms.connects and not self._is_own(port):
            return errno.ECONNREFUSED
        return _call("connect", taken, raw)

    def _bind(self, taken: int, thread: int, raw: bytes) -> int:
        family = _family(raw)
        if family == socket.AF_UNIX:
            place = _place(thread, raw)
            with self._files.opened(str(place.parent)) as folder:
                return _call("bind", taken, _unix(f"/proc/self/fd/{folder}/{place.name}"))
        if family not in _LOOPBACK:
            return errno.EAFNOSUPPORT
        port = int.from_bytes(raw[2:4], "big")
        if 0 < port < _FIRST_FREE_PORT:
            return errno.EACCES
        return self._bind_to(taken, family, port)

    def _bind_to(self, taken: int, family: int, port: int) -> int:
        address = struct.pack("=H", family) + port.to_bytes(2, "big")
        address += bytes(4) * (family == socket.AF_INET6) + _LOOPBACK[socket.AddressFamily(family)] + bytes(8)
        error = _call("bind", taken, address[: 16 if family == socket.AF_INET else 28])
        if not error:
            with socket.socket(fileno=os.dup(taken)) as bound:
                self._own_ports[bound.getsockname()[1]] = os.fstat(taken).st_ino
        return error

    def _listen(self, taken: int, backlog: int) -> int:
        """Let the socket listen. An unbound TCP socket is bound to loopback first: the kernel would bind it to all
        addresses.
        """
        with socket.socket(fileno=os.dup(taken)) as one:
            is_open = one.family in _LOOPBACK and not one.getsockname()[1]
            if is_open and (error := self._bind_to(taken, one.family, 0)):
                return error
            one.listen(min(backlog & 0xFFFFFFFF, socket.SOMAXCONN))
        return 0

    def _is_own(self, port: int) -> bool:
        """Return True if the socket that listens on this port was bound by a process of the server."""
        inode = self._own_ports.get(port)
        return inode is not None and inode in listening_inodes(port)

    def _waits(self, number: int) -> bool:
        """Return True if the caller still waits. A caller that no longer waits may have ended, and its process id may
        belong to another process.
        """
        try:
            fcntl.ioctl(self.listener, tracing.IS_VALID, struct.pack("=Q", number))
        except OSError:
            return False
        return True

    def _say(self, number: int, error: int, *, go_on: bool = False) -> None:
        answer = tracing.ANSWER.pack(number, 0, -error, tracing.CONTINUE if go_on and not error else 0)
        with suppress(FileNotFoundError):  # The thread was killed during the call.
            fcntl.ioctl(self.listener, tracing.SEND, bytearray(answer), True)


def _process_of(thread: int) -> int:
    for line in Path(f"/proc/{thread}/status").read_text().splitlines():
        if line.startswith("Tgid:"):
            return int(line.split()[1])
    raise ProcessLookupError(errno.ESRCH, "the thread has ended")


def _family(raw: bytes) -> int:
    return int.from_bytes(raw[:2], "little") if len(raw) > 2 else -1


def _is_loopback(family: int, raw: bytes) -> bool:
    if family == socket.AF_INET:
        return len(raw) >= 8 and raw[4] == 127
    return len(raw) >= 24 and raw[8:24] in (_LOOPBACK[socket.AF_INET6], bytes(10) + b"\xff\xff" + bytes((127, 0, 0, 1)))


def _place(thread: int, raw: bytes) -> Path:
    """Return the path in the address `raw` of a Unix socket; a relative path is relative to the calling thread's
    directory. Raises PermissionError for abstract names.
    """
    name = raw[2:].partition(b"\0")[0]
    if not name:
        raise PermissionError(errno.EACCES, "an abstract socket")
    return Path(f"/proc/{thread}/cwd", os.fsdecode(name))


def _unix(path: str) -> bytes:
    return struct.pack("=H", socket.AF_UNIX) + os.fsencode(path) + b"\0"


def _call(name: str, taken: int, address: bytes) -> int:
    """Make the system call `name` on the socket `taken`; return its errno, 0 for success."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(taken, address, len(address)) == 0:
        return 0
    return ctypes.get_errno()
