"""The seccomp filter for both processors, interpreted like the kernel does; `test_caging` tests its real effect."""

from __future__ import annotations

import errno
import struct

import pytest

from echo_shared.cage import seccomp, syscalls
from echo_shared.cage.leeway import LocalSockets

ALLOW, EPERM = 0x7FFF0000, 0x50000 | errno.EPERM
ANSWERS = {"clone3": errno.ENOSYS, "socket": errno.EAFNOSUPPORT, "connect": errno.ENOENT}
"""Refusals other than EPERM: the errors of a call or socket that does not exist, which drivers handle."""
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
PID = 4_321
STREAM, DATAGRAM, SEQUENCED, FLAGS = 1, 2, 5, 0o2004000
LOCAL: tuple[LocalSockets, ...] = ("none", "listening", "any")
READ_NUMBER = {"x86_64": 0, "aarch64": 63}


def run(program: bytes, number: int, architecture: int, *arguments: int) -> int:
    """Interpret a filter's BPF code, and return its result for a system call. Source:
    https://docs.kernel.org/networking/filter.html
    """
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<iIQ6Q", number, architecture, 0, *(value % 2**64 for value in padded))
    steps = list(struct.iter_unpack("=HBBI", program))
    place = accumulator = 0
    while True:
        code, then, otherwise, value = steps[place]
        place += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", data, value)
            case 0x54:
                accumulator &= value
            case 0x15:
                place += then if accumulator == value else otherwise
            case 0x35:
                place += then if accumulator >= value else otherwise
            case 0x06:
                return int(value)
            case _:
                raise AssertionError(code)


def refused(name: str) -> int:
    return 0x50000 | ANSWERS.get(name, errno.EPERM)


@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("processor", syscalls.PROCESSORS)
def test_exactly_the_named_calls_are_refused(processor: str, tcp: bool, local: LocalSockets) -> None:
    program = seccomp.program(processor, PID, tcp=tcp, local=local)
    partly = seccomp.conditions(PID, tcp=tcp, local=local)
    numbers = syscalls.numbers(processor)
    for name, number in numbers.items():
        if name not in partly:
            assert run(program, number, ARCHITECTURES[processor]) == refused(name), name
    for number in set(range(600)) - set(numbers.values()):
        assert run(program, number, ARCHITECTURES[processor]) == ALLOW
    assert len(program) // 8 < 4_096, "the kernel accepts no longer program"


@pytest.mark.parametrize("processor", syscalls.PROCESSORS)
def test_calls_of_another_architecture_are_refused(processor: str) -> None:
    program = seccomp.program(processor, PID, tcp=False)
    # Audit numbers of 32-bit Intel and 32-bit ARM, then of all 64-bit processors.
    for architecture in (0x40000003, 0x40000028, *ARCHITECTURES.values()):
        expected = ALLOW if architecture == ARCHITECTURES[processor] else EPERM
        assert run(program, READ_NUMBER[processor], architecture) == expected
    assert run(program, 0x40000000 | 59, ARCHITECTURES[processor]) == EPERM, "x32's execve"


@pytest.mark.parametrize(
    ("name", "arguments", "tcp", "allowed"),
    [
        ("clone", (0x3D0F00,), False, True),  # A thread, as glibc starts it.
        ("clone", (0x01200011,), False, False),  # fork.
        ("clone", (0x10010000,), False, False),  # A thread in another user namespace.
        ("socketpair", (1, STREAM | FLAGS, 0), False, True),
        ("socketpair", (1, DATAGRAM, 0), False, False),
        ("socketpair", (2, STREAM, 0), False, False),
        ("socket", (2, STREAM, 0), False, False),
        ("socket", (2, STREAM | FLAGS, 6), True, True),
        ("socket", (10, STREAM, 0), True, True),
        ("socket", (1, STREAM, 0), True, False),
        ("socket", (2, DATAGRAM, 0), True, False),
        ("socket", (2, STREAM, 262), True, False),  # A socket for Multipath TCP.
        ("connect", (5,), False, False),
        ("connect", (5,), True, True),
        ("bind", (5,), True, False),
        ("listen", (5,), True, False),
        ("sendto", (5, 0, 0, 0x4000), True, True),
        ("sendto", (5, 0, 0, 0x20004000), True, False),  # MSG_FASTOPEN: this send would open a connection.
        ("sendmsg", (5, 0, 0x20000000), True, False),
        ("kill", (PID, 9), False, True),
        ("kill", (PID + 1, 0), False, False),
        ("kill", (-1, 9), False, False),
        ("kill", (0, 9), False, False),
        ("kill", (2**32 + PID, 9), False, True),  # The kernel uses only the lower half of this number.
        ("tgkill", (PID, 77, 6), False, True),
        ("prlimit64", (0,), False, True),
        ("prlimit64", (1,), False, False),
        ("setpriority", (0, 0, 19), False, True),
        ("setpriority", (2, 0, 19), False, False),  # This call would change the priority of all processes of the user.
        ("sched_setaffinity", (1,), False, False),
        ("prctl", (1, 0), False, False),  # PR_SET_PDEATHSIG 0: the process would outlive its parent.
        ("prctl", (15, 0), False, True),
        ("personality", (0xFFFFFFFF,), False, True),
        ("personality", (0x0040000,), False, False),
    ],
)
@pytest.mark.parametrize("processor", syscalls.PROCESSORS)
def test_calls_that_depend_on_their_arguments(
    processor: str, name: str, arguments: tuple[int, ...], tcp: bool, allowed: bool
) -> None:
    program = seccomp.program(processor, PID, tcp=tcp)
    number = syscalls.numbers(processor)[name]
    assert run(program, number, ARCHITECTURES[processor], *arguments) == (ALLOW if allowed else refused(name))


@pytest.mark.parametrize(
    ("name", "arguments", "allowed"),
    [
        (
            "socket",
            (1, SEQUENCED | FLAGS, 0),
            {("listening", False), ("listening", True), ("any", False), ("any", True)},
        ),
        ("socket", (1, STREAM, 0), {("any", False), ("any", True)}),
        ("socket", (1, DATAGRAM, 0), {("any", False), ("any", True)}),
        ("socket", (2, STREAM, 0), {("none", True), ("listening", True), ("any", True)}),
        ("socket", (2, SEQUENCED, 0), set()),
        ("socket", (10, DATAGRAM, 0), set()),
        ("socket", (16, DATAGRAM, 0), set()),  # Netlink: a socket to the kernel.
        ("socketpair", (1, STREAM, 0), {(local, tcp) for local in LOCAL for tcp in (False, True)}),
        ("socketpair", (1, SEQUENCED, 0), {("any", False), ("any", True)}),
        ("bind", (5,), {("listening", False), ("listening", True), ("any", False), ("any", True)}),
        ("listen", (5,), {("listening", False), ("listening", True), ("any", False), ("any", True)}),
        ("connect", (5,), {("none", True), ("listening", True), ("any", False), ("any", True)}),
        ("accept", (5,), {("none", True), ("listening", True), ("any", True)}),
    ],
)
@pytest.mark.parametrize("processor", syscalls.PROCESSORS)
def test_sockets_allowed_for_a_gpu_driver(
    processor: str, name: str, arguments: tuple[int, ...], allowed: set[tuple[LocalSockets, bool]]
) -> None:
    number = syscalls.numbers(processor)[name]
    for local in LOCAL:
        for tcp in (False, True):
            program = seccomp.program(processor, PID, tcp=tcp, local=local)
            expected = ALLOW if (local, tcp) in allowed else refused(name)
            assert run(program, number, ARCHITECTURES[processor], *arguments) == expected, (local, tcp)


def test_a_processor_without_a_filter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(OSError, match="no filter of system calls for riscv64"):
        seccomp.install(tcp=False)
