"""Where a request really comes from, and which address it was sent to."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from typing import Final

from aiohttp import web

from echo_shared.errors import RemoteProtocolError

_HOST: Final = re.compile(r"[A-Za-z0-9._-]{0,253}|[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._-]{1,32})?")
"""A name, an IPv4 address or nothing; or an IPv6 address and its zone."""


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


def place_of(host: str) -> str:
    """What counts as one address: of IPv6 the network that a customer is given."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    address = getattr(address, "ipv4_mapped", None) or address
    if address.version == 4 or address.is_loopback:
        return str(address)
    return str(ipaddress.ip_network((address, 64), strict=False).network_address) + "/64"


def origin_of(host: str) -> str:
    """What counts as one address where many keys may be one person's: its place. Empty on the hub's own host, which is
    the operator's."""
    place = place_of(host)
    return "" if place == "::1" or place.startswith("127.") else place


def is_https(request: web.Request, trusted_proxies: Collection[str]) -> bool:
    """Whether the client speaks TLS: with the hub, or by its own word with a proxy in `trusted_proxies`."""
    if request.remote in trusted_proxies:
        return request.headers.get("X-Forwarded-Proto", request.scheme) == "https"
    return request.secure


def hub_host(request: web.Request) -> str:
    """The name or address under which the client reached the hub; empty where it does not say.

    Raises RemoteProtocolError when it is none: other nodes are told of it.
    """
    try:
        host = request.url.raw_host or ""
    except ValueError as error:
        raise RemoteProtocolError("The request's Host is no address.", got=repr(request.host)) from error
    if not _HOST.fullmatch(host):
        raise RemoteProtocolError("The request's Host is no address.", got=repr(host))
    return host
