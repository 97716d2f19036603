"""Chooses the addresses and ports on which a BitTorrent client listens."""

from __future__ import annotations

import contextlib
import socket
from typing import Final

from echo_shared.errors import SwarmError
from echo_shared.swarm.base import SwarmSettings
from echo_shared.wire.sockets import is_loopback

_ALL_IPV4: Final = "0.0.0.0"
_ALL_IPV6: Final = "::"


def bindable(host: str, port: int) -> tuple[str, int]:
    """Return the IP address of `host` and a free port. libtorrent itself would choose another port for each
    interface.
    """
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
            address, free_port = server.getsockname()[:2]
            return str(address), int(free_port)
    except OSError as error:
        raise cannot_listen(f"{host} port {port}: {error}") from error


def interfaces(host: str, port: int) -> str:
    """Return the addresses on which libtorrent listens. If the address stands for all IPv4 addresses, the socket also
    listens on IPv6, if this machine has IPv6 and the port is free.
    """
    if host == _ALL_IPV4:
        with contextlib.suppress(OSError), socket.create_server((_ALL_IPV6, port), family=socket.AF_INET6):
            return f"{host}:{port},[{_ALL_IPV6}]:{port}"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def why_unasked(settings: SwarmSettings) -> str:
    """Return why this process does not ask the router to open ports; empty = it asks the router."""
    if is_loopback(settings.listen_host):
        return f"this machine listens on {settings.listen_host} only"
    return "" if settings.router_ports else "router_ports is off"


def cannot_listen(got: str) -> SwarmError:
    return SwarmError(
        "The BitTorrent peer cannot listen.",
        got=got,
        do="Set an address of this machine and a swarm port that nothing else uses (0 = any free one).",
    )
