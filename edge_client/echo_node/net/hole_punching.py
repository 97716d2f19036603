"""Connect two nodes that both sit behind home routers, so neither accepts connections from outside.

    ask       bind a local port, connect from it to the hub: the hub answers with the port's public address
              send a MeetWanted to the hub, and wait for the peer's Meet
    answer    the same, after the peer's Meet has come
    both      connect from the local port to the peer's addresses, and listen on it

A router lets packets from an address pass once a machine behind the router has sent a packet to this address. The nodes
connect at about the same time, so each node's first packet opens its own router for the other node. The result is an
ordinary TCP connection: two ends may connect to each other (RFC 9293, simultaneous open), and routers must let them
(RFC 5382). In 4.4 million attempts from 85,000 networks, TCP succeeded as often as QUIC over UDP, in 70 % (Trautwein et
al., Challenging Tribal Knowledge, arXiv 2510.27500, 2025). A router that gives each connection another public port
cannot be passed this way: both nodes then give up after CONNECT_S seconds.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing
from typing import Final, Protocol

from echo_node.host.address import HubAddress
from echo_node.net.local_port import Address, LocalPort
from echo_node.net.own_networks import is_neighbour, own_interfaces
from echo_shared.wire.messages import FromNode, Meet, MeetWanted

log = logging.getLogger(__name__)

CONNECT_S: Final = 2.0
"""Seconds for which both nodes try to connect."""
ANSWER_S: Final = 5.0
"""Seconds within which the peer must answer. The peer may need two seconds to learn its public address."""
MOST_ATTEMPTS: Final = 8
"""Maximum number of attempts at the same time, of this node and of its peers together. Further attempts wait; a peer's
attempt is dropped if the peer has given up meanwhile.
"""
ANSWER_AGAIN_S: Final = 1.5
"""Seconds after a peer's attempt during which the peer's next attempt is ignored. They double with each attempt. Honest
peers wait at least 2 s, and double that too.
"""
ANSWER_AGAIN_LIMIT_S: Final = 1_500.0
LASTING_S: Final = 30.0
"""A link that lasts this many seconds shows that the peer asked for a good reason: its next attempt is answered at
once.
"""


class HubSide(Protocol):
    """The methods of the hub's client that an attempt at hole punching uses."""

    address: HubAddress

    async def send(self, message: FromNode) -> None: ...


class AnswerWaits:
    """Decides which attempts of a peer are answered. After each answered attempt, the peer must wait longer. `now`:
    seconds of a monotonic clock.
    """

    def __init__(self) -> None:
        self._waits: dict[str, tuple[float, float]] = {}
        """(end time, length in seconds) of the last wait of each peer."""

    def take(self, node_id: str, *, now: float) -> bool:
        """Return True if the peer may be answered now, and begin its next wait."""
        ends_at, wait_s = self._waits.get(node_id, (now, ANSWER_AGAIN_S / 2))
        if now < ends_at:
            return False
        wait_s = min(2 * wait_s, ANSWER_AGAIN_LIMIT_S)
        self._waits[node_id] = now + wait_s, wait_s
        return True

    def linked(self, node_id: str, *, lasted_s: float) -> None:
        """Record the end of a link with the peer. After a lasting link, the peer's next attempt is answered at once."""
        if lasted_s >= LASTING_S:
            self.forget(node_id)

    def forget(self, node_id: str) -> None:
        """Answer the peer's next attempt at once."""
        self._waits.pop(node_id, None)


class HolePunching:
    """This node's attempts at hole punching. Before `use` has named a hub, no attempt is made."""

    def __init__(self, host: str) -> None:
        """`host`: the address on which this node listens."""
        self._host = host
        self._hub: HubSide | None = None
        self._sighting_url = ""
        self._asked: dict[str, asyncio.Future[Meet]] = {}
        """Attempts that wait for the peer's answer, by peer."""
        self.attempts = asyncio.Semaphore(MOST_ATTEMPTS)
        """Limit on attempts at the same time. Whoever calls `ask` must have acquired this semaphore."""

    def use(self, hub: HubSide, sighting_path: str) -> None:
        """Use this hub, whose Welcome named the path, to arrange attempts. An empty path: the hub does not help."""
        self._hub = hub if sighting_path else None
        self._sighting_url = hub.address.url(sighting_path)

    @property
    def is_on(self) -> bool:
        return self._hub is not None

    async def ask(self, node_id: str) -> socket.socket | None:
        """Return a connection to this peer through both routers; None if the attempt fails. Raises OSError if this
        machine has no free port.
        """
        with closing(LocalPort(self._host)) as port:
            port.open()
            answer = self._asked[node_id] = asyncio.get_running_loop().create_future()
            try:
                if not await self._want(port, node_id, answers=False):
                    return None
                async with asyncio.timeout(ANSWER_S):
                    meet = await answer
            except TimeoutError:
                log.debug("The node %s does not answer.", node_id)
                return None
            finally:
                del self._asked[node_id]
            connection = await _first(port.connections(usable(meet, port), seconds=CONNECT_S))
        if connection is None:
            log.debug("There is no way through the routers to the node %s.", node_id)
        return connection

    def heard(self, meet: Meet) -> None:
        """Handle a peer's Meet message that answers this node's attempt. An answer to no attempt is ignored."""
        answer = self._asked.get(meet.node_id)
        if answer is not None and not answer.done():
            answer.set_result(meet)

    async def answer(self, meet: Meet) -> AsyncGenerator[socket.socket]:
        """Answer a peer's attempt. Yield each connection: the peer uses one, and closes the others. Raises OSError if
        this machine has no free port.
        """
        loop = asyncio.get_running_loop()
        given_up_at = loop.time() + ANSWER_S / 2
        async with self.attempts:
            if loop.time() > given_up_at:
                return
            with closing(LocalPort(self._host)) as port:
                port.open()
                if not await self._want(port, meet.node_id, answers=True):
                    return
                async with aclosing(port.connections(usable(meet, port), seconds=CONNECT_S)) as found:
                    async for connection in found:
                        yield connection

    async def _want(self, port: LocalPort, node_id: str, *, answers: bool) -> bool:
        """Send a MeetWanted for this port. Return False if the hub has not told the port's public address."""
        if self._hub is None:
            return False
        await port.learn(self._sighting_url)
        if not port.sightings:
            return False
        await self._hub.send(
            MeetWanted(
                node_id=node_id,
                port=port.number,
                sightings=tuple(port.sightings),
                local_hosts=tuple(port.local_hosts),
                answers=answers,
            )
        )
        return True


async def _first(found: AsyncGenerator[socket.socket]) -> socket.socket | None:
    connection = None
    try:
        async with aclosing(found):
            connection = await anext(found, None)
    except BaseException:
        if connection is not None:
            connection.close()
        raise
    return connection


def usable(meet: Meet, port: LocalPort) -> list[Address]:
    """Return the usable addresses of a peer. Multicast, unspecified, link-local and reserved addresses are dropped. A
    loopback address is usable if the hub is on this machine. A private address is usable if peer and node share a
    router, or if the hub has an address in the same private network. The private address must belong to another
    machine, in the network that leads to the hub.
    """
    on_loopback = any(ipaddress.ip_address(host).is_loopback for host in port.local_hosts)
    seen_directly = [host for host in port.public_hosts if host in port.local_hosts]
    in_private_net = any(not ipaddress.ip_address(host).is_global for host in seen_directly)
    in_same_net = in_private_net or any(host in port.public_hosts for host, _ in meet.addresses)
    interfaces = own_interfaces() if in_same_net else ()

    def may_use(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
        if address.is_loopback:
            return on_loopback
        return address.is_global or is_neighbour(address, interfaces, port.local_hosts)

    return [
        (host, number)
        for host, number in meet.addresses
        if (address := _address(host)) is not None and may_use(address)
    ]


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address if a host may have it; None for an invalid address, or an address that stands for no single
    host.
    """
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return None
    is_special = found.is_multicast or found.is_unspecified or found.is_link_local
    return None if is_special or (found.is_reserved and not found.is_loopback) else found
