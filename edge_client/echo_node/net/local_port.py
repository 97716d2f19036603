"""A local TCP port for one attempt at hole punching. Connections to the hub, connections to the peer and the listening
socket all have the same port number.

Hole punching needs a router that maps one local port to one public port for all connections. The hub then sees the
public port to which the peer must send its packets.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import ipaddress
import logging
import random
import socket
import ssl
from collections.abc import AsyncGenerator, Collection, Sequence
from functools import cache
from typing import Final
from urllib.parse import SplitResult, urlsplit

from echo_shared.wire.messages.fields import printable_line

log = logging.getLogger(__name__)

SIGHTING_S: Final = 2.0
"""Seconds within which the hub must tell the port's public address."""
OTHER_FAMILY_S: Final = 0.25
"""Seconds to wait for the hub's answer over the second address family (IPv4 or IPv6) once it has answered over the
first one.
"""
MOST_TRIES: Final = 10
"""Maximum number of connection attempts to one address in case of immediate refusals."""
_AGAIN_S: Final = 0.1
"""Maximum wait before a retry after a refusal. The wait is random: a router that refuses a peer's first packet refuses
more packets for a moment, so the two nodes must not retry in step.
"""
_MOST_WAITING: Final = 8
"""Maximum number of connections that wait to be accepted on the port."""
_MOST_SIGHTING_BYTES: Final = 200
_MOST_HEAD_BYTES: Final = 8_192
_ALL_HOSTS: Final = ("", "0.0.0.0")
"""Host names that mean all IPv4 addresses of this machine; here they include IPv6."""
_FAMILIES: Final = {4: socket.AF_INET, 6: socket.AF_INET6}
Address = tuple[str, int]


class LocalPort:
    """A local port with one number, for IPv4, IPv6 or both. Connections made from the port stay open after `close`."""

    def __init__(self, host: str) -> None:
        """`host`: the address to bind to. If it means all addresses of IPv4, IPv6 is included."""
        self.number = 0
        self.sightings: list[str] = []
        """The hub's signed statements about this port's public address."""
        self.local_hosts: list[str] = []
        """Addresses of this machine in its own network."""
        self.public_hosts: list[str] = []
        """Public addresses of this port's host, from `sightings`."""
        self._hosts: dict[int, str] = {}
        """Local address to bind the port to, by address family."""
        self._probes: list[asyncio.StreamWriter] = []
        self._listeners: list[socket.socket] = []
        self._host = host

    def open(self) -> None:
        """Bind a free port. Raises OSError."""
        host = None if self._host in _ALL_HOSTS else self._host
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, _, _, _, address in found:
                self._listen(family, str(address[0]))
        except OSError as error:  # A machine often has no IPv6. One address family is enough.
            if not self._listeners:
                raise
            log.debug("A port is opened for one address family only: %s", error)

    def close(self) -> None:
        for probe in self._probes:
            probe.transport.abort()
        for listener in self._listeners:
            listener.close()

    async def learn(self, url: str) -> None:
        """Ask the hub for this port's public address, for each address family. Never raises: if the hub does not
        answer, the address is left out. The connections to the hub stay open, because the router then keeps the public
        port.
        """
        tasks = {asyncio.create_task(self._learn(url, family)) for family in self._hosts}
        try:
            pending = tasks
            while pending:
                wait_s = OTHER_FAMILY_S if self.sightings else None
                done, pending = await asyncio.wait(pending, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    return
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _learn(self, url: str, family: int) -> None:
        try:
            async with asyncio.timeout(SIGHTING_S):
                sighting = await self._ask(urlsplit(url), family)
                self.public_hosts.append(str(ipaddress.ip_address(sighting.split(" ")[0])))
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError, http.client.HTTPException) as error:
            log.debug("The hub does not tell a public address: %s", printable_line(str(error)))
        else:
            self.sightings.append(sighting)

    async def _ask(self, hub: SplitResult, family: int) -> str:
        loop, host, is_tls = asyncio.get_running_loop(), hub.hostname or "", hub.scheme == "https"
        found = await loop.getaddrinfo(
            host, hub.port or (443 if is_tls else 80), family=family, type=socket.SOCK_STREAM
        )
        connection = self._socket(family, self._hosts[family])
        try:
            await loop.sock_connect(connection, found[0][4])
            reader, writer = await asyncio.open_connection(
                sock=connection,
                limit=_MOST_HEAD_BYTES,
                ssl=_tls_context() if is_tls else None,
                server_hostname=host if is_tls else None,
            )
        except BaseException:
            connection.close()
            raise
        self._probes.append(writer)
        self.local_hosts.append(writer.get_extra_info("sockname")[0])
        writer.write(f"GET {hub.path} HTTP/1.1\r\nHost: {hub.netloc}\r\n\r\n".encode("ascii"))
        status, _, rest = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
        num_bytes = int(http.client.parse_headers(io.BytesIO(rest)).get("Content-Length", "0"))
        if status.split(b" ")[1:2] != [b"200"] or not 0 < num_bytes <= _MOST_SIGHTING_BYTES:
            raise ValueError(f"{status!r}, {num_bytes} bytes")
        return (await reader.readexactly(num_bytes)).decode("ascii")

    async def connections(self, addresses: Sequence[Address], *, seconds: float) -> AsyncGenerator[socket.socket]:
        """For `seconds`, connect to these addresses and accept connections from them. Yield each connection, whichever
        end has opened it.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + seconds
        found: asyncio.Queue[socket.socket] = asyncio.Queue(_MOST_WAITING)
        usable = [(host, port) for host, port in addresses if _family_of(host) in self._hosts]
        tasks = [asyncio.create_task(self._connect(address, found)) for address in usable]
        hosts = {host for host, _ in usable}
        tasks += [asyncio.create_task(_accept(listener, hosts, found)) for listener in self._listeners]
        try:
            while True:
                try:
                    async with asyncio.timeout_at(ends_at):
                        connection = await found.get()
                except TimeoutError:
                    return
                yield connection
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            while not found.empty():
                found.get_nowait().close()

    def _listen(self, family: int, host: str) -> None:
        listener = self._socket(family, host)
        self._listeners.append(listener)
        self._hosts[family] = host
        self.number = listener.getsockname()[1]
        listener.listen(_MOST_WAITING)

    def _socket(self, family: int, host: str) -> socket.socket:
        """Return a new socket that is bound to the port. Several sockets share the port."""
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            bound.setblocking(False)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "SO_REUSEPORT"):
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind((host, self.number))
        except BaseException:
            bound.close()
            raise
        return bound

    async def _connect(self, address: Address, found: asyncio.Queue[socket.socket]) -> None:
        """Connect to the address, and put the connection into `found`. Retry while the connection is refused, at most
        MOST_TRIES times.
        """
        loop, family = asyncio.get_running_loop(), _family_of(address[0])
        for _ in range(MOST_TRIES):
            try:
                connection = self._socket(family, self._hosts[family])
            except OSError as error:
                log.debug("No socket for a connection to a node: %s", error)
                return
            try:
                await loop.sock_connect(connection, address)
                await found.put(connection)
                return
            except OSError as error:  # The peer refused, or its own connection from the same address came first.
                connection.close()
                log.debug("No connection to a node at %s, port %d: %s", *address, error)
            except BaseException:
                connection.close()
                raise
            await asyncio.sleep(_AGAIN_S * random.random())


async def _accept(listener: socket.socket, hosts: Collection[str], found: asyncio.Queue[socket.socket]) -> None:
    """Accept connections from these hosts, and put them into `found`; close connections from other hosts."""
    loop = asyncio.get_running_loop()
    while True:
        connection, address = await loop.sock_accept(listener)
        if address[0] in hosts and not found.full():
            found.put_nowait(connection)
        else:
            connection.close()


@cache
def _tls_context() -> ssl.SSLContext:
    """Return the TLS context for connections to the hub. It is cached, because loading the system's certificates takes
    long.
    """
    return ssl.create_default_context()


def _family_of(host: str) -> int:
    """Return the family (IPv4 or IPv6) of an IP address. Raises ValueError if `host` is not an IP address."""
    return _FAMILIES[ipaddress.ip_address(host).version]
