"""Endless websocket frames of each kind in the protocol, sent on raw sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from websockets.asyncio.connection import Connection

FLOOD_S: Final = 10.0
BLOCK_BYTES: Final = 256 * 1024
_READ_BYTES: Final = 2**20
_MASK: Final = bytes(4)
"""Mask of a client's frames: a mask of zeros leaves the payload unchanged."""


def frame(first: int, payload: bytes = b"") -> bytes:
    """Return a client's frame of at most 125 bytes. `first` is its first byte, with opcode and final bit."""
    return bytes((first, 0x80 | len(payload))) + _MASK + payload


KINDS: Final[Mapping[str, tuple[bytes, bytes]]] = {
    "empty pings": (b"", frame(0x89)),
    "pings without a mask": (b"", b"\x89\x00"),
    "full pings": (b"", frame(0x89, bytes(125))),
    "empty pongs": (b"", frame(0x8A)),
    "full pongs": (b"", frame(0x8A, bytes(125))),
    "closes with a reason": (b"", frame(0x88, b"\x03\xe8" + b"x" * 123)),
    "closes without a code": (b"", frame(0x88)),
    "empty messages": (b"", frame(0x82)),
    "empty texts": (b"", frame(0x81)),
    "messages of a byte": (b"", frame(0x82, b"\xc0")),
    "empty fragments": (frame(0x02), frame(0x00)),
    "fragments without a mask": (frame(0x02), b"\x00\x00"),
    "fragments of a byte": (frame(0x02), frame(0x00, b"x")),
    "messages of two fragments": (b"", frame(0x02) + frame(0x80)),
    "pings between fragments": (frame(0x02), frame(0x00) + frame(0x89)),
    "kinds that do not exist": (b"", frame(0x83)),
    "large control frames": (b"", b"\x89\xfe\x10\x00" + _MASK + bytes(4096)),
}
"""For each kind of flood: bytes to send once, and bytes to repeat."""


def flood(end: socket.socket, kind: str, *, reads: bool = True, within_s: float = FLOOD_S) -> bool:
    """Send frames of this kind as fast as possible; return True if the other side closes the connection. With `reads`,
    read and discard its answers meanwhile.
    """
    first, again = KINDS[kind]
    block = again * (BLOCK_BYTES // len(again))
    give_up_at = time.monotonic() + within_s
    unsent = memoryview(first + block)
    end.setblocking(False)
    try:
        while time.monotonic() < give_up_at:
            took = False
            with suppress(BlockingIOError):
                unsent = unsent[end.send(unsent) :] or memoryview(block)
                took = True
            with suppress(BlockingIOError):
                if reads and not end.recv(_READ_BYTES):
                    return True
            if not took:
                time.sleep(0.001)
    except OSError:
        return True
    return False


def raw(connection: Connection) -> socket.socket:
    """Stop the websocket library's reading of an open connection, and return a copy of the connection's socket. The
    caller must close the copy.
    """
    transport = connection.transport
    transport.pause_reading()
    end: socket.socket = transport.get_extra_info("socket")
    return socket.socket(fileno=socket.dup(end.fileno()))
