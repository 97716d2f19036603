"""How far a connection's other end has come with what it is sent: what the program holds, and what the system tells."""

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
"""Of Linux's `struct tcp_info` (include/uapi/linux/tcp.h), up to the fields that are read here."""

Progress = tuple[int, int]
"""Bytes that the program still holds, and bytes that the other end has acknowledged: other figures later, and something
has gone through."""


def progress(transport: asyncio.Transport) -> Progress | None:
    """None when nothing waits to be sent, or nobody can tell: files go past the program, and only Linux says how many
    of their bytes wait, and how many have arrived."""
    held = transport.get_write_buffer_size()
    unsent, acked = _of_system(transport.get_extra_info("socket"))
    return (held, acked) if held or unsent else None


def _of_system(connection: socket.socket | None) -> tuple[int, int]:
    """Bytes that the system has not sent yet, and bytes that have arrived; zeros where it does not tell."""
    if connection is None or sys.platform != "linux":
        return 0, 0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:  # It has ended.
        return 0, 0
    if len(info) < _INFO_BYTES:
        return 0, 0
    return _UNSENT.unpack_from(info, _UNSENT_AT)[0], _ACKED.unpack_from(info, _ACKED_AT)[0]
