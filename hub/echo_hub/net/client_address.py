"""Where a request really comes from."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from aiohttp import web

from echo_shared.errors import RemoteProtocolError


def client_ip(request: web.Request, trusted_proxies: Collection[str]) -> str:
    """The client's address. Behind a proxy in `trusted_proxies` it is the last one in X-Forwarded-For; from anybody
    else that header is ignored. Raises RemoteProtocolError when it is no address."""
    ip = request.remote or ""
    if ip in trusted_proxies:
        ip = request.headers.get("X-Forwarded-For", ip).rpartition(",")[2].strip()
    try:
        address = ipaddress.ip_address(ip)
    except ValueError as error:
        raise RemoteProtocolError("A client's address cannot be told.", got=repr(ip)) from error
    return str(getattr(address, "ipv4_mapped", None) or address)
