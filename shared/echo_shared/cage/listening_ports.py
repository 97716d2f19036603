"""Finds the sockets that listen on a TCP port of this machine, on Linux.

The kernel's sock_diag service (https://man7.org/linux/man-pages/man7/sock_diag.7.html) answers for one port in
microseconds. Where that service is missing, /proc/net/tcp is read, which takes milliseconds if there are thousands of
connections.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_DONE, _ERROR = 3, 2
_REQUEST_DUMP: Final = 0x301
_LISTEN: Final = 10
_HEADER: Final = struct.Struct("=IHHII")
_INODE_AT: Final = 68
"""Byte offset of the inode in the kernel's `inet_diag_msg`."""


def listening_inodes(port: int) -> set[int]:
    """Return the inodes of the sockets that listen on this port, over IPv4 and IPv6."""
    try:
        return {inode for family in (socket.AF_INET, socket.AF_INET6) for inode in _asked(family, port)}
    except OSError:
        return set(_read(port))


def _asked(family: int, port: int) -> Iterator[int]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        address = port.to_bytes(2, "big") + bytes(46)
        asked = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, 1 << _LISTEN) + address
        kernel.send(_HEADER.pack(_HEADER.size + len(asked), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + asked)
        while True:
            said = kernel.recv(65_536)
            while len(said) >= _HEADER.size:
                length, kind, *_ = _HEADER.unpack_from(said)
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    raise OSError("the kernel does not list sockets")
                yield int.from_bytes(said[_HEADER.size + _INODE_AT :][:4], "little")
                said = said[(length + 3) & ~3 :]


def _read(port: int) -> Iterator[int]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(FileNotFoundError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if int(fields[3], 16) == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    yield int(fields[9])
