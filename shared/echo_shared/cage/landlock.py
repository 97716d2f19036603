"""Landlock: limits the use of files, TCP ports, signals and abstract sockets, for this thread and the threads that it
starts later.

https://docs.kernel.org/userspace-api/landlock.html. Its system calls have the same numbers on all processors.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import IntFlag
from functools import cache
from pathlib import Path
from typing import Final

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION: Final = 1
_PATH_BENEATH, _NET_PORT = 1, 2
_BIND_TCP, _CONNECT_TCP = 1, 2
_BIND_AND_CONNECT_TCP: Final = 3
_ABSTRACT_SOCKETS_AND_SIGNALS: Final = 3
_ALL_THREADS: Final = 1 << 3
_RULESET_BYTES, _PATH_RULE_BYTES = 24, 12
_PR_SET_NO_NEW_PRIVS: Final = 38

PORTS_ABI: Final = 4
"""First version of Landlock's interface (ABI) that limits TCP ports."""
TRUNCATING_ABI: Final = 3
"""First version of Landlock's interface (ABI) that controls the truncation of files."""
SCOPES_ABI: Final = 6
"""First version of Landlock's interface (ABI) that limits signals and abstract sockets."""
THREADS_ABI: Final = 8
"""First version of Landlock's interface (ABI) that also restricts threads that already run."""


class AccessRights(IntFlag):
    """Access rights to a file, or to everything below a directory."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13
    TRUNCATE = 1 << 14
    IOCTL_DEV = 1 << 15


READ: Final = AccessRights.READ_FILE | AccessRights.READ_DIR
WRITE: Final = (
    READ
    | AccessRights.WRITE_FILE
    | AccessRights.TRUNCATE
    | AccessRights.REMOVE_DIR
    | AccessRights.REMOVE_FILE
    | AccessRights.MAKE_DIR
    | AccessRights.MAKE_REG
    | AccessRights.REFER
)
DEVICE: Final = READ | AccessRights.WRITE_FILE | AccessRights.IOCTL_DEV
_OF_FILES: Final = (
    AccessRights.EXECUTE
    | AccessRights.WRITE_FILE
    | AccessRights.READ_FILE
    | AccessRights.TRUNCATE
    | AccessRights.IOCTL_DEV
)
_BITS_OF_ABI: Final = {1: 13, 2: 14, 3: 15, 5: 16}
"""Landlock ABI version -> how many of the lowest bits of `AccessRights` it supports. Versions without an entry equal
the previous version.
"""

_kept: list[int] = []
"""Open descriptors of the /proc entries in rules. They stay open, because an entry of /proc that nothing holds open
changes its inode.
"""


@cache
def _libc() -> ctypes.CDLL:
    """Return the C library. Its functions are declared to take integers; addresses are passed as integers."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.argtypes, libc.syscall.restype = [ctypes.c_long] * 5, ctypes.c_long
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    return libc


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process. Raises OSError."""
    if _libc().prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")


def abi() -> int:
    """Return the ABI of this kernel's Landlock. Raises OSError if the kernel has no Landlock."""
    try:
        return _call(_CREATE_RULESET, 0, 0, _VERSION)
    except OSError as error:
        why = {errno.ENOSYS: "this kernel has no Landlock", errno.EOPNOTSUPP: "Landlock is switched off at boot"}
        raise OSError(error.errno, why.get(error.errno or 0, f"Landlock: {error.strerror}")) from error


def restrict(
    version: int, rules: Mapping[Path, AccessRights], ports: Iterable[int], *, listens: Iterable[int] = ()
) -> None:
    """Forbid all access that the arguments do not allow, from now on. `version` is the result of `abi`.

    `ports`: TCP ports to which the process may connect; `listens`: those that it may bind; both on any host.

    Paths that do not exist or cannot be opened are skipped. Raises OSError, and then changes nothing.
    """
    prepared = Rules(version, rules, ports, listens=listens)
    try:
        prepared.apply()
    finally:
        prepared.close()


class Rules:
    """Landlock rules prepared in advance: their paths are already open, except those in /proc/self, which each process
    opens for itself.

    A forked process that applies prepared rules runs little Python. This saves memory, because each Python function
    that a fork runs copies some pages of its parent's memory.
    """

    def __init__(
        self,
        version: int,
        rules: Mapping[Path, AccessRights],
        ports: Iterable[int],
        *,
        listens: Iterable[int] = (),
        own: AccessRights | None = None,
    ) -> None:
        """The arguments are those of `restrict`. `own`: access rights to the directory that is passed to `apply`."""
        known = (1 << max(bits for since, bits in _BITS_OF_ABI.items() if since <= version)) - 1
        connects = _BIND_AND_CONNECT_TCP if version >= PORTS_ABI else 0
        scopes = _ABSTRACT_SOCKETS_AND_SIGNALS if version >= SCOPES_ABI else 0
        self._handled = ctypes.create_string_buffer(struct.pack("=QQQ", known, connects, scopes), _RULESET_BYTES)
        self._flags = _ALL_THREADS if version >= THREADS_ABI else 0
        self._own = int(own or 0) & known
        self._later: list[tuple[str, int]] = []
        """Paths in /proc/self, which each process opens for itself, with the access rights to each."""
        self._later_rule = ctypes.create_string_buffer(_PATH_RULE_BYTES)
        self._descriptors: list[int] = []
        self._added: list[tuple[int, int]] = []
        """Type and memory address of each rule whose path is already open, and of each rule for a port."""
        self._buffers: list[ctypes.Array[ctypes.c_char]] = []
        """Memory to which the rules' addresses point. The references keep it allocated."""
        for path, access in rules.items():
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                bits = int(access if path.is_dir() else access & _OF_FILES) & known
                if path.is_relative_to("/proc/self"):
                    self._later += [(str(path), bits)] if path.exists() else []
                    continue
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
                (_kept if path.is_relative_to("/proc") else self._descriptors).append(descriptor)
                self._add(_PATH_BENEATH, struct.pack("=Qi", bits, descriptor))
        allowed = [*((_CONNECT_TCP, port) for port in ports), *((_BIND_TCP, port) for port in listens)]
        for right, port in allowed if version >= PORTS_ABI else ():
            self._add(_NET_PORT, struct.pack("=QQ", right, port))

    def _add(self, kind: int, rule: bytes) -> None:
        buffer = ctypes.create_string_buffer(rule, len(rule))
        self._buffers.append(buffer)
        self._added.append((kind, ctypes.addressof(buffer)))

    def apply(self, own: str = "") -> None:
        """Forbid all access that the rules do not allow, from now on. `own`: a directory to which the process gets the
        constructor's `own` rights. Raises OSError, and then changes nothing.
        """
        ruleset = _call(_CREATE_RULESET, ctypes.addressof(self._handled), _RULESET_BYTES)
        try:
            for kind, address in self._added:
                _call(_ADD_RULE, ruleset, kind, address)
            for path, bits in [*self._later, (own, self._own)] if own else self._later:
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
                struct.pack_into("=Qi", self._later_rule, 0, bits, descriptor)
                _call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.addressof(self._later_rule))
                if path is own:
                    os.close(descriptor)
                else:
                    _kept.append(descriptor)
            prctl(_PR_SET_NO_NEW_PRIVS, 1)
            _call(_RESTRICT_SELF, ruleset, self._flags)
        finally:
            os.close(ruleset)

    def close(self) -> None:
        """Close the descriptors of the rules' paths. The rules cannot be applied again."""
        for descriptor in self._descriptors:
            os.close(descriptor)


def _call(number: int, first: int, second: int = 0, third: int = 0, fourth: int = 0) -> int:
    result: int = _libc().syscall(number, first, second, third, fourth)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
