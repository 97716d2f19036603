"""Find the address under which others reach this hub.

It comes from the settings, from a request's Host header, or from this machine's network interface.
"""

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
"""A host name or address with an optional port. People paste it into a shell, so no shell metacharacter is allowed."""
_NOWHERE: Final = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses reserved for documentation; they belong to no machine."""


def outward_ip() -> str | None:
    """Return this machine's network address; None without a network. Sends nothing."""
    for family, nowhere in _NOWHERE.items():
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((nowhere, 9))  # For UDP, connect() only chooses the source address.
                found = str(probe.getsockname()[0])
        except OSError:
            continue
        if not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
            return found
    return None


def shared_address(settings: ServerConfig, local: str) -> str:
    """Return the hub's address to give to other machines. `local`: the address for this machine."""
    if settings.public_url or settings.host not in WILDCARDS:
        return local
    outward = outward_ip()
    if outward is None:
        return local
    parts = urlsplit(local)
    host = f"[{outward}]" if ":" in outward else outward
    return f"{parts.scheme}://{host}:{parts.port}"


def requested_address(request: web.Request, settings: ServerConfig) -> str:
    """Return the URL under which the sender of this request reached the hub; `public_url` if it is set.

    The host is taken from X-Forwarded-Host if the request came through a trusted proxy, else from Host. Returns "" if
    the host is a loopback address or malformed.
    """
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
