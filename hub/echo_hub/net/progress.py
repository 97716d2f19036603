"""Detect if data sent on a connection still moves, from asyncio's write buffer and Linux's TCP counters."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from typing import Final

_ACKED: Final = struct.Struct("=Q")
_ACKED_AT: Final = 120
_UNSENT: Final = struct.Struct("=I")
_UNSENT_AT: Final = 144
_INFO_BYTES: Final = 148
"""Size of the first part of Linux's `struct tcp_info` (include/uapi/linux/tcp.h), up to the end of the field at
`_UNSENT_AT`.
"""

Progress = tuple[int, int]
"""(bytes in the write buffer, bytes acknowledged by the peer). If one of the values changes between two calls, data has
moved.
"""


def progress(transport: asyncio.Transport) -> Progress | None:
    """Return the connection's progress; None if no data waits to be sent, or the system reports no counters.

    The kernel sends files without the write buffer. For files, only Linux reports unsent and acknowledged bytes.
    """
    held = transport.get_write_buffer_size()
    unsent, acked = _of_system(transport.get_extra_info("socket"))
    return (held, acked) if held or unsent else None


def _of_system(connection: socket.socket | None) -> tuple[int, int]:
    """Return (unsent, acknowledged) bytes from the kernel; zeros on systems that do not report them."""
    if connection is None or sys.platform != "linux":
        return 0, 0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:  # The socket is closed.
        return 0, 0
    if len(info) < _INFO_BYTES:
        return 0, 0
    return _UNSENT.unpack_from(info, _UNSENT_AT)[0], _ACKED.unpack_from(info, _ACKED_AT)[0]
