"""The address under which others reach this hub: as the settings say, as the reader's request says, or as this machine
is seen from its network."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from echo_hub.config.serving_sections import ServerConfig
from echo_hub.net.client_address import is_https

WILDCARDS: Final = frozenset({"0.0.0.0", "::", ""})
_HOST: Final = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
"""A name or an address, with or without a port: nothing that a shell would take for more, for people copy it."""
_NOWHERE: Final = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses of documentation, which are nobody's."""


def outward_ip() -> str | None:
    """This machine's address on its network; None where it has none. Sends nothing."""
    for family, nowhere in _NOWHERE.items():
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((nowhere, 9))  # Of datagrams that only chooses the address to send from.
                found = str(probe.getsockname()[0])
        except OSError:
            continue
        if not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
            return found
    return None


def shared_address(settings: ServerConfig, local: str) -> str:
    """What to tell others; `local` is the address that holds on this machine."""
    if settings.public_url or settings.host not in WILDCARDS:
        return local
    outward = outward_ip()
    if outward is None:
        return local
    parts = urlsplit(local)
    host = f"[{outward}]" if ":" in outward else outward
    return f"{parts.scheme}://{host}:{parts.port}"


def requested_address(request: web.Request, settings: ServerConfig) -> str:
    """The address at which whoever asks has reached the hub, by a proxy's word if it is a trusted one's. Empty where
    that says nothing: on this machine itself, or where it is no address. With a public_url it is that."""
    if settings.public_url:
        return settings.public_url.rstrip("/")
    host = request.headers.get("Host", "")
    if request.remote in settings.trusted_proxies:
        host = request.headers.get("X-Forwarded-Host", host).partition(",")[0].strip()
    if not _HOST.fullmatch(host) or _is_this_machine(host):
        return ""
    return f"{'https' if is_https(request, settings.trusted_proxies) else 'http'}://{host}"


def _is_this_machine(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or ""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
