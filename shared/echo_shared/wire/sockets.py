"""Socket options that asyncio does not offer."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket


def keep_unsent_short(transport: asyncio.BaseTransport, unsent_bytes: int) -> None:
    """Let at most `unsent_bytes` of a connection's data wait unsent in the kernel. Linux and macOS only.

    Data in flight does not count, so the connection's speed is unchanged. Later data stays in the program, which may
    still drop or reorder it, and connections share the network line fairly.
    """
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is None:
        return
    with contextlib.suppress(OSError):  # The connection may have ended.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, option, unsent_bytes)


def is_loopback(host: str) -> bool:
    """Return True if a host name or address is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
