"""Records the system calls that a cage refuses to a process, and the files that the process opens.

The filter of `seccomp` refuses silently. The filter here notifies a supervisor process of each refused call and of each
openat. The supervisor records the call and returns the errno of the silent filter. A process cannot supervise itself:
it would wait for its own answer.

    child: listener = watch(tcp=False, local="none"); sends that number to its parent; does the work to record
    parent: Supervisor(pid, listener).run()

https://docs.kernel.org/userspace-api/seccomp_filter.html#userspace-notification
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import select
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from echo_shared.cage import seccomp, syscalls
from echo_shared.cage.leeway import LocalSockets

_HEADER_STEPS: Final = 6
"""Number of instructions at the start of `seccomp.program`, before the first one that compares the number of the system
call. The instructions that report openat are inserted there.
"""
_OPENAT: Final = {"x86_64": 257, "aarch64": 56}
NOTICE: Final = struct.Struct("=QIIiIQ6Q")
ANSWER: Final = struct.Struct("=QqiI")
RECEIVE, SEND, IS_VALID = 0xC0502100, 0xC0182101, 0x40082102
CONTINUE: Final = 1
_PIDFD_GETFD: Final = 438
_LONGEST_PATH: Final = 4_096
_LOOK_MS: Final = 100
_FAMILIES: Final = {1: "AF_UNIX", 2: "AF_INET", 10: "AF_INET6", 16: "AF_NETLINK"}
_KINDS: Final = {1: "SOCK_STREAM", 2: "SOCK_DGRAM", 3: "SOCK_RAW", 5: "SOCK_SEQPACKET"}


@dataclass(frozen=True, slots=True)
class Opened:
    path: str
    flags: int


def watch(*, tcp: bool, local: LocalSockets) -> int:
    """Report the refused calls and opened files of this thread, and of threads that it starts later, to a supervisor.
    Return the descriptor for the supervisor.

    Raises OSError if the kernel has no notifications (before Linux 5.0).
    """
    processor = platform.machine()
    steps = _watched(seccomp.program(processor, os.getpid(), tcp=tcp, local=local), _OPENAT[processor])
    return seccomp.load(steps, seccomp.NEW_LISTENER)


def _watched(program: bytes, openat: int) -> bytes:
    """Return the filter `program` with a notification in place of each refusal, and for each openat."""
    notify = (seccomp.RETURN, 0, 0, seccomp.NOTIFY)
    steps = [notify if _refuses(step) else step for step in struct.iter_unpack("=HBBI", program)]
    steps[_HEADER_STEPS:_HEADER_STEPS] = [(seccomp.JUMP_EQUAL, 0, 1, openat), notify]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _refuses(step: tuple[int, ...]) -> bool:
    """Return True if the step refuses a call. ENOSYS does not count, because every new thread gets it from clone3."""
    code, _, _, value = step
    return code == seccomp.RETURN and value >> 16 == seccomp.ERRNO >> 16 and value & 0xFFFF != errno.ENOSYS


class Supervisor:
    """Supervisor of one child process. `refused` counts the refused system calls, by their description. `opened` lists
    the files that the child tried to open, in order and without repetitions.
    """

    def __init__(self, pid: int, listener: int) -> None:
        """`listener`: the descriptor that `watch` returned in the child. Raises OSError if tracing is forbidden."""
        self.refused: Counter[str] = Counter()
        self.opened: dict[Opened, None] = {}
        self._names = {number: name for name, number in syscalls.numbers(platform.machine()).items()}
        self._openat = _OPENAT[platform.machine()]
        child = os.pidfd_open(pid)
        try:
            self._listener = take(child, listener)
        finally:
            os.close(child)

    def run(self) -> None:
        """Answer notifications until the child has ended."""
        waiting = select.poll()
        waiting.register(self._listener, select.POLLIN)
        try:
            while True:
                for _, event in waiting.poll(_LOOK_MS):
                    if event & select.POLLIN:
                        self._answer()
                    elif event & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
                        return
        finally:
            os.close(self._listener)

    def _answer(self) -> None:
        notice = bytearray(NOTICE.size)
        try:
            fcntl.ioctl(self._listener, RECEIVE, notice, True)
            number, thread, _, call, _, _, *arguments = NOTICE.unpack(notice)
            if call == self._openat:
                self.opened.setdefault(Opened(_text(thread, arguments[1]), arguments[2] & 0xFFFFFFFF))
                answer = ANSWER.pack(number, 0, 0, CONTINUE)
            else:
                name = self._names.get(call, f"call {call}")
                error = seccomp.ANSWERS.get(name, errno.EPERM)
                self.refused[f"{name}({_words(name, thread, arguments)}): {errno.errorcode[error]}"] += 1
                answer = ANSWER.pack(number, 0, -error, 0)
            fcntl.ioctl(self._listener, SEND, bytearray(answer), True)
        except FileNotFoundError:
            return  # The thread was killed during the call.


def take(child: int, listener: int) -> int:
    """Return a copy of the descriptor `listener` of the process with the pidfd `child`. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    taken: int = libc.syscall(
        ctypes.c_long(_PIDFD_GETFD), ctypes.c_long(child), ctypes.c_long(listener), ctypes.c_long(0)
    )
    if taken < 0:
        raise OSError(ctypes.get_errno(), f"the process cannot be watched: {os.strerror(ctypes.get_errno())}")
    return taken


def _words(name: str, thread: int, arguments: list[int]) -> str:
    """Return a text with the arguments of a call, for calls whose arguments show their purpose; "" for all others."""
    if name in ("socket", "socketpair"):
        return f"{_FAMILIES.get(arguments[0], arguments[0])}, {_KINDS.get(arguments[1] & 0xF, arguments[1])}"
    if name in ("connect", "bind"):
        return _address(memory(thread, arguments[1], min(arguments[2], 128)))
    if name in ("execve", "chmod", "truncate"):
        return repr(_text(thread, arguments[0]))
    return ""


def _address(raw: bytes) -> str:
    if len(raw) < 2:
        return ""
    family, name = int.from_bytes(raw[:2], "little"), raw[2:]
    if family != socket.AF_UNIX:
        return str(_FAMILIES.get(family, family))
    if name[:1] == b"\0":
        return repr("@" + name[1:].rstrip(b"\0").decode(errors="replace"))
    return repr(name.partition(b"\0")[0].decode(errors="replace"))


def _text(thread: int, address: int) -> str:
    return b"".join(_pieces(thread, address)).partition(b"\0")[0].decode(errors="replace")


def _pieces(thread: int, address: int) -> Iterator[bytes]:
    """Yield the memory from `address` on, page by page, up to the text's end: the page after the end may not exist."""
    while address and (count := min(_LONGEST_PATH, 4_096 - address % 4_096)):
        piece = memory(thread, address, count)
        yield piece
        if not piece or b"\0" in piece:
            return
        address += count


def memory(thread: int, address: int, count: int) -> bytes:
    """Return memory of the thread; b"" if the thread has ended or the address is invalid."""
    try:
        with Path(f"/proc/{thread}/mem").open("rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(count)
    except OSError:
        return b""  # The thread has ended or the address is invalid. The system call will fail for the same reason.
