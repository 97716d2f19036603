"""A filter of system calls for all threads of this process. Refused calls fail with EPERM, or as `ANSWERS` says.

https://docs.kernel.org/userspace-api/seccomp_filter.html. Calls without a rule are allowed, because GPU drivers use
many different calls. The checked arguments are C ints: the kernel reads only their lower 32 bits, and so does the
filter.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from echo_shared.cage import syscalls
from echo_shared.cage.leeway import LocalSockets

_LOAD, _AND, RETURN = 0x20, 0x54, 0x06
JUMP_EQUAL, _JUMP_AT_LEAST = 0x15, 0x35
_ALLOW: Final = 0x7FFF0000
ERRNO: Final = 0x00050000
NOTIFY: Final = 0x7FC00000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ARCHITECTURES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SECCOMP: Final = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER: Final = 1
ALL_THREADS, _AS_FAST_AS_BEFORE, NEW_LISTENER = 1 << 0, 1 << 2, 1 << 3
"""Flags of seccomp(2). _AS_FAST_AS_BEFORE turns off a protection against speculation attacks, which slows down filtered
code on kernels before 5.16.
"""
_X32_CALLS: Final = 0x40000000
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NO_NEW_PRIVS: Final = 38

_THREAD: Final = 0x00010000
_NAMESPACES: Final = 0x7E020080
"""Flags of clone that put the new process into new namespaces."""
_UNIX, _IPV4, _IPV6 = 1, 2, 10
_STREAM, _SEQUENCED = 1, 5
_IPPROTO_TCP: Final = 6
_KIND: Final = 0xF
"""Bits of a socket's type argument that hold the type; the other bits are flags."""
_FAST_OPEN: Final = 0x20000000
"""Flag MSG_FASTOPEN of a send: the call then also connects, which Landlock does not check."""
_WHOLE: Final = 0xFFFFFFFF
_ASKS_ONLY: Final = 0xFFFFFFFF
ANSWERS: Final = {"clone3": errno.ENOSYS, "socket": errno.EAFNOSUPPORT, "connect": errno.ENOENT}
"""Errno of refused calls that must not fail with EPERM: callers would think that the system is broken.

clone3: a filter cannot read its flags; on ENOSYS the C library falls back to clone. socket: a kernel without that kind
of socket answers EAFNOSUPPORT. connect: a missing service answers ENOENT, and CUDA then starts without MPS.
"""


@dataclass(frozen=True, slots=True)
class Only:
    """Allow the call if its argument, masked with `mask`, is one of `values`."""

    argument: int
    values: tuple[int, ...]
    mask: int = _WHOLE


@dataclass(frozen=True, slots=True)
class Except:
    argument: int
    value: int


_TCP: Final = (
    Only(0, (_IPV4, _IPV6)),
    Only(1, (_STREAM,), _KIND),
    Only(2, (0, _IPPROTO_TCP)),  # MPTCP is also a stream protocol, but Landlock does not check its connections.
)
_PAIR: Final = (Only(0, (_UNIX,)), Only(1, (_STREAM,), _KIND))
"""Checks for socketpair: only pairs of Unix stream sockets are allowed, because a datagram socket could send to any
address.
"""
_LOCAL: Final = Only(0, (_UNIX,))


@dataclass(frozen=True, slots=True)
class Null:
    """Allow the call if this argument, a pointer of 64 bits, is NULL."""

    argument: int


Check = tuple[Only | Except | Null, ...]
"""Conditions on a call's arguments, which must all hold; empty = the call is always allowed."""


def conditions(pid: int, *, tcp: bool, local: LocalSockets = "none") -> Mapping[str, tuple[Check, ...]]:
    """Return the calls that process `pid` may make only with certain arguments, each with its checks. A call is allowed
    if one of its checks holds.

    `tcp`: the process may connect to TCP ports that Landlock allows. `local`: kinds of Unix sockets that the process
    may use; Landlock refuses to bind them to a file name.
    """
    return {name: (check,) for name, check in _for_itself(pid).items()} | _sockets(tcp=tcp, local=local)


def _for_itself(pid: int) -> Mapping[str, Check]:
    """Return the checks of calls that a process may direct only at itself, by name."""
    own, current = (pid,), (0,)
    return {
        "clone": (Only(0, (_THREAD,), _THREAD | _NAMESPACES),),
        "kill": (Only(0, own),),
        "tgkill": (Only(0, own),),
        "prlimit64": (Only(0, (0, pid)),),
        "setpriority": (Only(0, current), Only(1, current)),
        "ioprio_set": (Only(0, (1,)), Only(1, current)),
        "move_pages": (Only(0, (0, pid)),),
        "sched_setaffinity": (Only(0, (0, pid)),),
        "sched_setscheduler": (Only(0, (0, pid)),),
        "sched_setparam": (Only(0, (0, pid)),),
        "sched_setattr": (Only(0, (0, pid)),),
        "personality": (Only(0, (_ASKS_ONLY,)),),
        "prctl": (Except(0, _PR_SET_PDEATHSIG),),
        "sendto": (Only(3, (0,), _FAST_OPEN),),
        "sendmmsg": (Only(3, (0,), _FAST_OPEN),),
        "sendmsg": (Only(2, (0,), _FAST_OPEN),),
    }


def _sockets(*, tcp: bool, local: LocalSockets) -> dict[str, tuple[Check, ...]]:
    anything: tuple[Check, ...] = ((),)
    allowed: dict[str, tuple[Check, ...]] = {"socketpair": (_PAIR,) if local != "any" else ((_LOCAL,),)}
    made: list[Check] = []
    if tcp:
        made.append(_TCP)
        allowed |= dict.fromkeys(("connect", "accept", "accept4"), anything)
    if local != "none":
        made.append((_LOCAL,) if local == "any" else (_LOCAL, Only(1, (_SEQUENCED,), _KIND)))
        allowed |= dict.fromkeys(("bind", "listen"), anything)
    if local == "any":
        allowed["connect"] = anything
    return {**allowed, "socket": tuple(made)} if made else allowed


def program(processor: str, pid: int, *, tcp: bool, local: LocalSockets = "none") -> bytes:
    """Return the filter as BPF code. `processor`: one of `syscalls.PROCESSORS`."""
    return built(processor, syscalls.numbers(processor), conditions(pid, tcp=tcp, local=local))


def built(
    processor: str,
    numbers: Mapping[str, int],
    partly: Mapping[str, tuple[Check, ...]],
    asked: Collection[str] = (),
) -> bytes:
    """Return a filter that refuses the calls in `numbers`, except where a check of `partly` holds.

    Calls in `asked` are not refused: a supervisor process decides about them (`tracing`).
    """
    refused = ERRNO | errno.EPERM
    code = [
        _step(_LOAD, _ARCHITECTURE),
        _step(JUMP_EQUAL, _ARCHITECTURES[processor], then=1),
        _step(RETURN, refused),
        _step(_LOAD, _NUMBER),
        _step(_JUMP_AT_LEAST, _X32_CALLS, otherwise=1),
        _step(RETURN, refused),
    ]
    for name, number in numbers.items():
        checks = [step for check in partly.get(name, ()) for step in _compiled(check)]
        block = [*checks, _step(RETURN, NOTIFY if name in asked else ERRNO | ANSWERS.get(name, errno.EPERM))]
        code += [_step(JUMP_EQUAL, number, otherwise=len(block)), *block]
    return b"".join([*code, _step(RETURN, _ALLOW)])


def _compiled(check: Check) -> list[bytes]:
    """Compile a check: allow the call if all conditions hold, else jump to the code after the check."""
    code = [_step(RETURN, _ALLOW)]
    for one in reversed(check):
        load = _step(_LOAD, _ARGUMENTS + 8 * one.argument)
        if isinstance(one, Null):
            upper = _step(_LOAD, _ARGUMENTS + 8 * one.argument + 4)
            halves = (load, _step(JUMP_EQUAL, 0, otherwise=len(code) + 2), upper)
            code = [*halves, _step(JUMP_EQUAL, 0, otherwise=len(code)), *code]
            continue
        if isinstance(one, Except):
            code = [load, _step(JUMP_EQUAL, one.value, then=len(code)), *code]
            continue
        others, last = one.values[:-1], one.values[-1]
        jumps = [_step(JUMP_EQUAL, value, then=len(others) - place) for place, value in enumerate(others)]
        code = [load, _step(_AND, one.mask), *jumps, _step(JUMP_EQUAL, last, otherwise=len(code)), *code]
    return code


def _step(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", code, then, otherwise, value)


def install(*, tcp: bool, local: LocalSockets = "none") -> None:
    """Apply the filter to all threads of this process, permanently. Raises OSError."""
    processor = platform.machine()
    if processor not in syscalls.PROCESSORS:
        raise OSError(errno.ENOSYS, f"Echo has no filter of system calls for {processor}")
    if struct.calcsize("P") != 8:
        raise OSError(errno.ENOSYS, "Echo has no filter of system calls for a 32-bit Python")
    steps = program(processor, os.getpid(), tcp=tcp, local=local)
    load(steps, ALL_THREADS)


@cache
def _libc() -> ctypes.CDLL:
    """Return the C library. Its functions are declared to take integers; addresses are passed as integers."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.argtypes, libc.syscall.restype = [ctypes.c_long] * 4, ctypes.c_long
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    return libc


def load(program: bytes, flags: int) -> int:
    """Install this filter with these flags of seccomp(2), and return that call's result. Raises OSError."""
    return Filter(program).load(flags)


class Filter:
    """A filter that is prepared in advance, so that a forked process runs little Python to install it."""

    def __init__(self, program: bytes, some_pid: int = 0) -> None:
        """`some_pid`: number that stands in the program for the id of the installing process; 0 = the program contains
        no process id.
        """
        wanted = some_pid.to_bytes(4, sys.byteorder)
        self._pids = [at for at in range(4, len(program), 8) if some_pid and program[at : at + 4] == wanted]
        """Byte offsets in the program at which the process id must be written. A number is the second half of an
        instruction.
        """
        self._buffer = ctypes.create_string_buffer(program, len(program))
        described = struct.pack("@HP", len(program) // 8, ctypes.addressof(self._buffer))
        self._described = ctypes.create_string_buffer(described, len(described))
        self._number = _SECCOMP[platform.machine()]

    def load(self, flags: int) -> int:
        """Install the filter in this process with these flags of seccomp(2), and return that call's result. Raises
        OSError."""
        for at in self._pids:
            struct.pack_into("=I", self._buffer, at, os.getpid())
        libc = _libc()
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), f"no_new_privs: {os.strerror(ctypes.get_errno())}")
        wanted = flags | _AS_FAST_AS_BEFORE
        returned: int = libc.syscall(self._number, _SET_MODE_FILTER, wanted, ctypes.addressof(self._described))
        if returned < 0:
            raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")
        if returned and flags & ALL_THREADS:
            raise OSError(errno.EAGAIN, f"seccomp: thread {returned} does not accept the filter")
        return returned
