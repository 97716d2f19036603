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
from pathlib import Path
from typing import Final

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION: Final = 1
_PATH_BENEATH, _NET_PORT = 1, 2
_CONNECT_TCP: Final = 2
_BIND_AND_CONNECT_TCP: Final = 3
_ABSTRACT_SOCKETS_AND_SIGNALS: Final = 3
_ALL_THREADS: Final = 1 << 3
_RULESET_BYTES: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38

PORTS_ABI: Final = 4
"""First version of Landlock's interface (ABI) that limits TCP ports."""
TRUNCATING_ABI: Final = 3
"""First ABI that controls the truncation of files."""
SCOPES_ABI: Final = 6
"""First ABI that limits signals and abstract sockets."""
THREADS_ABI: Final = 8
"""First ABI that includes threads that already run."""


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
"""Number of bits of `AccessRights` that an ABI knows, from that ABI on."""

_kept: list[int] = []
"""Open descriptors of the /proc entries in rules. They stay open, because an entry of /proc that nothing holds open
changes its inode.
"""


def abi() -> int:
    """Return the ABI of this kernel's Landlock. Raises OSError if the kernel has no Landlock."""
    try:
        return _call(_CREATE_RULESET, None, 0, _VERSION)
    except OSError as error:
        why = {errno.ENOSYS: "this kernel has no Landlock", errno.EOPNOTSUPP: "Landlock is switched off at boot"}
        raise OSError(error.errno, why.get(error.errno or 0, f"Landlock: {error.strerror}")) from error


def restrict(version: int, rules: Mapping[Path, AccessRights], ports: Iterable[int]) -> None:
    """Forbid all access that `rules` and `ports` do not allow, from now on. `version` is the result of `abi`.

    Paths that do not exist or cannot be opened are skipped. Raises OSError, and then changes nothing.
    """
    known = AccessRights((1 << max(bits for since, bits in _BITS_OF_ABI.items() if since <= version)) - 1)
    ruleset = _call(
        _CREATE_RULESET,
        struct.pack(
            "=QQQ",
            known,
            _BIND_AND_CONNECT_TCP if version >= PORTS_ABI else 0,
            _ABSTRACT_SOCKETS_AND_SIGNALS if version >= SCOPES_ABI else 0,
        ),
        _RULESET_BYTES,
        0,
    )
    try:
        for path, access in rules.items():
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                _add_path(ruleset, path, access & known)
        for port in ports if version >= PORTS_ABI else ():
            _call(_ADD_RULE, ruleset, _NET_PORT, struct.pack("=QQ", _CONNECT_TCP, port), 0)
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        _call(_RESTRICT_SELF, ruleset, _ALL_THREADS if version >= THREADS_ABI else 0)
    finally:
        os.close(ruleset)


def _add_path(ruleset: int, path: Path, access: AccessRights) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", access if path.is_dir() else access & _OF_FILES, descriptor)
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        if path.is_relative_to("/proc"):
            _kept.append(descriptor)
        else:
            os.close(descriptor)


def _call(number: int, *arguments: bytes | int | None) -> int:
    wide = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result: int = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *wide)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
