"""What the system's sockets can do beyond asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket


def keep_unsent_short(transport: asyncio.BaseTransport, unsent_bytes: int) -> None:
    """Has the system take no more of a connection's data while it holds `unsent_bytes` unsent; Linux and macOS can.

    What is on its way does not count, so that a connection's speed stays what it is; but what the program would send
    next waits with the program, which may still think better of it, and connections share the line.
    """
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is None:
        return
    with contextlib.suppress(OSError):  # Of a connection that has ended meanwhile.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, option, unsent_bytes)


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
