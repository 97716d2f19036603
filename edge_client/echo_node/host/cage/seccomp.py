"""A filter of system calls, for all threads of this process: what is refused fails with EPERM.

https://docs.kernel.org/userspace-api/seccomp_filter.html. What is not named is let through: GPU drivers use many calls,
and no two the same. Arguments that are checked are C ints, of which the kernel looks at the lower 32 bits alone, and so
does the filter.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from echo_node.host.cage import syscalls

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMP_EQUAL, _JUMP_AT_LEAST = 0x15, 0x35
_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ARCHITECTURES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SECCOMP: Final = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER: Final = 1
_ALL_THREADS, _AS_FAST_AS_BEFORE = 1 << 0, 1 << 2
"""The second: kernels before 5.16 else slow the processor down, for code that a filter does not trust to be honest."""
_X32_CALLS: Final = 0x40000000
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NO_NEW_PRIVS: Final = 38

_THREAD: Final = 0x00010000
_NAMESPACES: Final = 0x7E020080
"""Of clone's flags."""
_UNIX, _IPV4, _IPV6 = 1, 2, 10
_STREAM: Final = 1
_IPPROTO_TCP: Final = 6
_KIND: Final = 0xF
"""Of a socket's type; the rest are flags."""
_FAST_OPEN: Final = 0x20000000
"""Connects by sending, which Landlock does not see."""
_WHOLE: Final = 0xFFFFFFFF
_ASKS_ONLY: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Only:
    """A call is let through when its argument, within `mask`, is one of `values`."""

    argument: int
    values: tuple[int, ...]
    mask: int = _WHOLE


@dataclass(frozen=True, slots=True)
class Except:
    """A call is let through unless its argument is `value`."""

    argument: int
    value: int


_TCP: Final = (
    Only(0, (_IPV4, _IPV6)),
    Only(1, (_STREAM,), _KIND),
    Only(2, (0, _IPPROTO_TCP)),  # MPTCP would be a stream as well, but one that Landlock does not see.
)
_PAIR: Final = (Only(0, (_UNIX,)), Only(1, (_STREAM,), _KIND))
"""Of Unix sockets that know each other alone; a datagram's could send to any."""


def conditions(pid: int, *, tcp: bool) -> Mapping[str, tuple[Only | Except, ...]]:
    """Calls that are let through in part by the process `pid`; `tcp`: it may connect, as far as Landlock lets it."""
    own, current = (pid,), (0,)
    allowed: dict[str, tuple[Only | Except, ...]] = {
        "clone": (Only(0, (_THREAD,), _THREAD | _NAMESPACES),),
        "socketpair": _PAIR,
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
    return {**allowed, "socket": _TCP, "connect": (), "accept": (), "accept4": ()} if tcp else allowed


def program(processor: str, pid: int, *, tcp: bool) -> bytes:
    """The filter, as the kernel reads it. `processor`: one of `syscalls.PROCESSORS`."""
    refused, unknown = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    code = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_JUMP_EQUAL, _ARCHITECTURES[processor], then=1),
        _step(_RETURN, refused),
        _step(_LOAD, _NUMBER),
        _step(_JUMP_AT_LEAST, _X32_CALLS, otherwise=1),
        _step(_RETURN, refused),
    ]
    partly = conditions(pid, tcp=tcp)
    for name, number in syscalls.numbers(processor).items():
        if name == "clone3":  # Its flags lie where a filter does not see them; who is told so uses clone.
            block = [_step(_RETURN, unknown)]
        elif name in partly:
            block = [step for only in partly[name] for step in _check(only, refused)] + [_step(_RETURN, _ALLOW)]
        else:
            block = [_step(_RETURN, refused)]
        code += [_step(_JUMP_EQUAL, number, otherwise=len(block)), *block]
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def _check(only: Only | Except, refused: int) -> list[bytes]:
    if isinstance(only, Except):
        load = _step(_LOAD, _ARGUMENTS + 8 * only.argument)
        return [load, _step(_JUMP_EQUAL, only.value, otherwise=1), _step(_RETURN, refused)]
    jumps = [_step(_JUMP_EQUAL, value, then=len(only.values) - place) for place, value in enumerate(only.values)]
    masked = [_step(_LOAD, _ARGUMENTS + 8 * only.argument), _step(_AND, only.mask)]
    return [*masked, *jumps, _step(_RETURN, refused)]


def _step(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", code, then, otherwise, value)


def install(*, tcp: bool) -> None:
    """From here on it holds for every thread. Raises OSError."""
    processor = platform.machine()
    if processor not in syscalls.PROCESSORS:
        raise OSError(errno.ENOSYS, f"Echo knows no filter of system calls for {processor}")
    if struct.calcsize("P") != 8:
        raise OSError(errno.ENOSYS, "Echo knows no filter of system calls for a Python of 32 bits")
    steps = program(processor, os.getpid(), tcp=tcp)
    buffer = ctypes.create_string_buffer(steps, len(steps))
    described = struct.pack("@HP", len(steps) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    long = ctypes.c_long
    flags = _ALL_THREADS | _AS_FAST_AS_BEFORE
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, long(1), long(0), long(0), long(0)):
        raise OSError(ctypes.get_errno(), f"no_new_privs: {os.strerror(ctypes.get_errno())}")
    unsynchronised = libc.syscall(long(_SECCOMP[processor]), long(_SET_MODE_FILTER), long(flags), described)
    if unsynchronised:
        why = os.strerror(ctypes.get_errno()) if unsynchronised < 0 else f"thread {unsynchronised} does not take it"
        raise OSError(ctypes.get_errno(), f"seccomp: {why}")
