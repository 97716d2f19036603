"""What connections may cost the hub: how many there are, of whom, and how long each may do nothing.

A connection is a *stranger's* until a request on it has shown that it is a node's (`vouch`): a proven websocket, or a
passkey. Strangers are limited in all and for each address, nodes' connections for each address and each node. For one
connection too many, the oldest makes room that waits for a request of its other end's: honest requests arrive within
moments, so who only holds connections loses them to who has something to say. Where none waits, the one that has been
reading its answer for longest does; where none reads, the newest is closed. The last quarter of all connections is for
strangers and for nodes that are known: whose work was of use, or that come by an invite. Fresh keys have the others.

For one TLS handshake too many under way, the oldest makes room, too. New connections and strangers' requests have a
rate, in all and for each address (`address_rate`). What waits in memory for strangers to read it has a limit: beyond
it, the one that has read its answer for longest is cut off. How long a connection may do nothing is its own
(`connection`).

Connections from a trusted proxy are its clients': each request counts for the address that the proxy names, the
connection for nobody, and it may be idle.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from aiohttp import hdrs, web

from echo_hub.config.serving_sections import ServerConfig
from echo_hub.net.address_rate import AddressRate
from echo_hub.net.client_address import client_ip, place_of
from echo_hub.net.connection import READ_BYTES, Account, Connection, Cut, Stage
from echo_hub.net.turnstile import Turnstile
from echo_shared.errors import RefusedError, RemoteProtocolError
from echo_shared.messages import RefusalCode

HANDSHAKES_PER_S: Final = 250.0
MOST_HANDSHAKES: Final = 1_024
"""That wait for their turn."""
MOST_UNDER_WAY: Final = 256
"""Handshakes that have begun, each of which holds about 300 KB. At their rate of turns one has a second at least."""
SWEEP_S: Final = 5.0
MOST_OF_NODE: Final = 32
"""Connections of one node: a websocket, and fetching."""
MOST_HELD_BYTES: Final = 24 * 2**20
"""Of answers that strangers have not read yet."""
UNKNOWN_SHARE: Final = 0.75
"""Of all connections: when nodes hold so many, one that is not known finds no room."""

_LATER: Final = {hdrs.RETRY_AFTER: "1"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
"""What answers a request."""


class Limits:
    """Of one port. `make` a protocol for each connection; `answering` precedes all handlers; `sweep` now and then."""

    def __init__(self, settings: ServerConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = clock
        self.buffer = memoryview(bytearray(READ_BYTES))
        self.cuts: Counter[Cut] = Counter()
        self.handshakes = Turnstile(rate=HANDSHAKES_PER_S, most_waiting=MOST_HANDSHAKES)
        """Of TLS."""
        self._connections = AddressRate(
            in_all=settings.connections_per_s, of_one=settings.connections_per_s_per_address, now=clock()
        )
        self._requests = AddressRate(
            in_all=settings.requests_per_s, of_one=settings.requests_per_s_per_address, now=clock()
        )
        self._settings = settings
        self._proxies = frozenset(settings.trusted_proxies)
        self._most = settings.max_connections
        self._all: dict[Connection, None] = {}
        self._waiting: dict[Connection, None] = {}
        """Of strangers' connections those whose next request has not arrived, oldest first."""
        self._under_way: dict[Connection, None] = {}
        """Handshakes, oldest first."""
        self._strangers_of: Counter[str] = Counter()
        """By address, as are `_nodes_of`; `_of_node` by node."""
        self._nodes_of: Counter[str] = Counter()
        self._of_node: Counter[str] = Counter()
        self._num_strangers = self._num_nodes = 0
        self._held: dict[Connection, int] = {}
        """Bytes of answers to strangers, oldest first, and their sum."""
        self._num_held = 0

    @property
    def counts(self) -> dict[str, int]:
        """How often what was cut, since the start."""
        return {cut.value: number for cut, number in self.cuts.items()}

    @property
    def num_open(self) -> int:
        return len(self._all)

    @property
    def num_strangers(self) -> int:
        return self._num_strangers

    def allow(self, descriptors: int) -> None:
        """The system allows no more than so many connections."""
        self._most = min(self._most, descriptors)

    def make(self, inner: Callable[[], asyncio.Protocol], context: ssl.SSLContext | None = None) -> Connection:
        """`context`: it speaks TLS."""
        return Connection(self, inner, context)

    def admits(self, host: str) -> bool:
        """Whether one more connection from this address is within the rates."""
        if host in self._proxies or self._connections.take(place_of(host), now=self.now()):
            return True
        self.cuts[Cut.TOO_FAST] += 1
        return False

    def opened(self, connection: Connection) -> bool:
        """Whether there is room for it, or some could be made."""
        peer = connection.transport.get_extra_info("peername")
        host = str(peer[0]) if peer else ""
        connection.is_proxy = host in self._proxies
        account = None if connection.is_proxy else Account(place_of(host))
        if not self._has_room(account):
            return False
        self._all[connection] = None
        self._count(connection, account)
        self._wait(connection)
        return True

    def closed(self, connection: Connection) -> None:
        """It is gone, or as good as that."""
        if connection in self._all:
            del self._all[connection]
            self._waiting.pop(connection, None)
            self._under_way.pop(connection, None)
            self._num_held -= self._held.pop(connection, 0)
            self._count(connection, None)

    def holds(self, connection: Connection, num_bytes: int) -> None:
        """So much waits for its other end to read it."""
        self._num_held -= self._held.pop(connection, 0)
        if num_bytes and connection in self._all and not (connection.account and connection.account.node_id):
            self._held[connection] = num_bytes
            self._num_held += num_bytes
        while self._num_held > MOST_HELD_BYTES and len(self._held) > 1:
            self.cuts[Cut.TOO_MUCH_HELD] += 1
            self._abort(next(iter(self._held)))

    def _has_room(self, account: Account | None) -> bool:
        if len(self._all) >= self._most and not self._make_room(Cut.TOO_MANY):
            return False
        if account is None:
            return True
        if self._num_strangers >= self._settings.max_strangers and not self._make_room(Cut.TOO_MANY_STRANGERS):
            return False
        of_place = self._strangers_of[account.place]
        return of_place < self._settings.max_strangers_per_address or self._make_room(
            Cut.TOO_MANY_OF_ADDRESS, account.place
        )

    def _make_room(self, reason: Cut, place: str | None = None) -> bool:
        """Closes the oldest that waits for a request, of this address or of any, or else the oldest whose last answer
        is on its way; False where there is neither."""
        self.cuts[reason] += 1
        reading = None
        for connection in self._waiting:
            if place is not None and connection.account != Account(place):
                continue
            if not connection.transport.get_write_buffer_size():
                self._abort(connection)
                return True
            reading = reading or connection
        if reading is not None:
            self._abort(reading)
        return reading is not None

    def cut(self, connection: Connection, reason: Cut) -> None:
        """Closes it at once, and counts why."""
        self.cuts[reason] += 1
        self._abort(connection)

    def _abort(self, connection: Connection) -> None:
        self.closed(connection)
        connection.transport.abort()

    def _wait(self, connection: Connection) -> None:
        if connection.account is not None and not connection.account.node_id:
            self._waiting[connection] = None

    def _count(self, connection: Connection, account: Account | None) -> None:
        """From now on for this account, and no longer for the one before."""
        for one, change in ((connection.account, -1), (account, 1)):
            if one is None:
                continue
            if one.node_id:
                _add(self._of_node, one.node_id, change)
                _add(self._nodes_of, one.place, change)
                self._num_nodes += change
            else:
                _add(self._strangers_of, one.place, change)
                self._num_strangers += change
        connection.account = account

    @web.middleware
    async def answering(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The middleware in front of all others; for what no route answers, too."""
        connection = _connection_of(request)
        if connection is None or connection not in self._all:
            return await handler(request)
        self._waiting.pop(connection, None)
        connection.began(request, self.now())
        try:
            self._count(connection, self._account_of(request, connection))
            if connection.account is not None and not self._requests.take(connection.account.place, now=self.now()):
                self.cuts[Cut.TOO_FAST_REQUESTS] += 1
                refusal = web.HTTPTooManyRequests(text="Too many requests. Try again soon.\n", headers=_LATER)
                if not connection.is_proxy:
                    refusal.force_close()  # What waits behind it would cost an answer each.
                raise refusal
            return await handler(request)
        finally:
            if connection in self._all:
                connection.answered(self.now())
                if connection.is_proxy:
                    self._count(connection, None)
                self._wait(connection)

    def _account_of(self, request: web.Request, connection: Connection) -> Account | None:
        """A request counts as a stranger's at first. Raises HTTPTooManyRequests for one too many by way of a proxy."""
        if not connection.is_proxy:
            return None if connection.account is None else Account(connection.account.place)
        try:
            place = place_of(client_ip(request, self._proxies))
        except RemoteProtocolError:  # The route says so, where it needs the address.
            place = ""
        reason = None
        if self._num_strangers >= self._settings.max_strangers:
            reason = Cut.TOO_MANY_STRANGERS
        elif self._strangers_of[place] >= self._settings.max_strangers_per_address:
            reason = Cut.TOO_MANY_OF_ADDRESS
        if reason is not None:
            self.cuts[reason] += 1
            raise web.HTTPTooManyRequests(text="Too many requests at once. Try again soon.\n", headers=_LATER)
        return Account(place)

    def vouch(self, request: web.Request, node_id: str, *, is_known: bool = False) -> None:
        """The request is this node's. Raises RefusedError when the node, its address, or all nodes together, where it
        is not known, have too many already."""
        connection = _connection_of(request)
        if connection is None or connection not in self._all or connection.account is None:
            return
        place, reason = connection.account.place, None
        if self._of_node[node_id] >= MOST_OF_NODE:
            reason = Cut.TOO_MANY_OF_NODE
        elif self._nodes_of[place] >= self._settings.max_nodes_per_address:
            reason = Cut.TOO_MANY_OF_ADDRESS
        elif not is_known and self._num_nodes >= UNKNOWN_SHARE * self._most:
            reason = Cut.TOO_MANY_UNKNOWN
        if reason is not None:
            self.cuts[reason] += 1
            raise RefusedError(
                "This node, others at its address, or unknown ones have too many connections to the hub.",
                got=reason.value.replace("_", " "),
                do="Try again later, or ask the hub's operator for an invite or more server.max_nodes_per_address.",
                code=RefusalCode.TOO_SOON,
            )
        self._requests.give_back(place)
        self._count(connection, replace(connection.account, node_id=node_id))
        connection.go_on_reading()

    def count_frames(self, request: web.Request, flooded: Callable[[], None]) -> None:
        """The request becomes a websocket: `Connection.count_frames`. Raises RemoteProtocolError where frames came
        before the handshake's answer, as RFC 6455 (section 4.1) forbids: they would not be counted."""
        if request.protocol._message_tail:  # What the library holds of what follows the request's head.
            raise RemoteProtocolError("A node sent frames before its handshake was answered.", do="Upgrade the node.")
        connection = _connection_of(request)
        if connection is not None:
            connection.count_frames(flooded)

    def began_handshake(self, connection: Connection) -> None:
        """Its turn has come, and it costs something now."""
        self._under_way[connection] = None
        if len(self._under_way) > MOST_UNDER_WAY:
            self.cut(next(iter(self._under_way)), Cut.TOO_MANY_HANDSHAKES)

    def ended_handshake(self, connection: Connection) -> None:
        """It speaks TLS from now on."""
        self._under_way.pop(connection, None)

    def end_handshakes(self) -> None:
        """The hub ends, and knows no more of these connections than that they are there."""
        for connection in tuple(self._all):
            if connection.stage is Stage.HANDSHAKE:
                self._abort(connection)

    def sweep(self) -> None:
        """Closes what has done nothing for too long."""
        now = self.now()
        for connection in tuple(self._all):
            reason = connection.overdue(now)
            if reason is not None:
                if reason is not Cut.IDLE:
                    self.cuts[reason] += 1
                self._abort(connection)


def _connection_of(request: web.Request) -> Connection | None:
    protocol = None if request.transport is None else request.transport.get_protocol()
    return protocol if isinstance(protocol, Connection) else None


def _add(counter: Counter[str], key: str, change: int) -> None:
    """Keeps no zeros."""
    counter[key] += change
    if not counter[key]:
        del counter[key]
