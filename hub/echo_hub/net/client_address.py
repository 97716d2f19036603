"""Determine the address of a request's client and the host that the client connected to, also behind proxies."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from typing import Final

from aiohttp import web

from echo_shared.errors import RemoteProtocolError

_HOST: Final = re.compile(r"[A-Za-z0-9._-]{0,253}|[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._-]{1,32})?")
"""A host name, an IPv4 address or nothing; or an IPv6 address with an optional zone."""


def client_ip(request: web.Request, trusted_proxies: Collection[str]) -> str:
    """Return the client's IP address.

    For a proxy in `trusted_proxies` it is the last entry of X-Forwarded-For. From other clients that header is ignored.
    Raises RemoteProtocolError if the entry is not an IP address.
    """
    ip = request.remote or ""
    if ip in trusted_proxies:
        ip = request.headers.get("X-Forwarded-For", ip).rpartition(",")[2].strip()
    try:
        address = ipaddress.ip_address(ip)
    except ValueError as error:
        raise RemoteProtocolError("A client's IP address is malformed.", got=repr(ip)) from error
    return str(getattr(address, "ipv4_mapped", None) or address)


def place_of(host: str) -> str:
    """Return the key under which rates and limits count `host`: an IPv4 address, or the /64 network of an IPv6
    address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    address = getattr(address, "ipv4_mapped", None) or address
    if address.version == 4 or address.is_loopback:
        return str(address)
    return str(ipaddress.ip_network((address, 64), strict=False).network_address) + "/64"


def origin_of(host: str) -> str:
    """Return the place (`place_of`) of `host`, or "" for loopback, where all keys belong to the operator.

    Used to tell whether several keys may belong to one person.
    """
    place = place_of(host)
    return "" if place == "::1" or place.startswith("127.") else place


def is_https(request: web.Request, trusted_proxies: Collection[str]) -> bool:
    """Return True if the client uses TLS to the hub, or to a proxy in `trusted_proxies` as X-Forwarded-Proto says."""
    if request.remote in trusted_proxies:
        return request.headers.get("X-Forwarded-Proto", request.scheme) == "https"
    return request.secure


def hub_host(request: web.Request) -> str:
    """Return the host name or address under which the client reached the hub; "" if the request has no Host header.

    Raises RemoteProtocolError for a malformed host, because the hub passes it on to other nodes.
    """
    try:
        host = request.url.raw_host or ""
    except ValueError as error:
        raise RemoteProtocolError("The request's Host is not an address.", got=repr(request.host)) from error
    if not _HOST.fullmatch(host):
        raise RemoteProtocolError("The request's Host is not an address.", got=repr(host))
    return host
