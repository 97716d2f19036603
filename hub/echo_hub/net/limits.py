"""Limit what connections cost the hub: their number per address and node, and the time that they may stay inactive.

A connection belongs to a *stranger* until a request authenticates a node (`vouch`), by websocket or passkey. Strangers'
connections are limited in total and per address, nodes' connections per address and per node.

A stranger over a limit replaces another stranger's connection: first the oldest one that waits for its client's
request, because honest clients send theirs within moments; otherwise the oldest one whose client is still reading a
response. If there is neither, the new connection is closed. Nodes whose keys are new may connect only while all nodes
together hold less than three quarters of all connections. The last quarter is for strangers and for known nodes, which
have done useful work or come with an invite.

The number of running TLS handshakes is limited; a new one aborts the oldest. New connections and strangers' requests
are limited in rate, in total and per address (`address_rate`). Responses buffered for strangers are limited in memory:
above the limit, the stranger whose last buffered response is oldest is disconnected. Inactivity is checked per
connection (`connection`).

Connections from a trusted proxy belong to its clients: each request counts for the address that the proxy names. The
connection itself counts for no address and may stay idle.
"""

from __future__ import annotations

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
from echo_hub.net.connection import READ_BYTES, Account, CloseReason, Connection, Stage
from echo_hub.net.turnstile import Turnstile
from echo_shared.errors import RefusedError, RemoteProtocolError
from echo_shared.wire.messages import RefusalCode

HANDSHAKES_PER_S: Final = 250.0
MOST_HANDSHAKES: Final = 1_024
"""Maximum number of TLS handshakes that wait for their turn."""
MOST_UNDER_WAY: Final = 256
"""Maximum number of TLS handshakes running at the same time; each takes about 300 KB of memory. Only HANDSHAKES_PER_S
begin per second, so a new one aborts none that is younger than a second."""
SWEEP_S: Final = 5.0
MOST_OF_NODE: Final = 32
"""Maximum number of connections of one node: its websocket and its downloads."""
MOST_OF_TENANT: Final = 2_048
"""Maximum number of connections of one tenant: its client opens one for each request that waits."""
MOST_HELD_BYTES: Final = 24 * 2**20
"""Maximum number of bytes of responses buffered in memory for all strangers (clients that have not authenticated)
together.
"""
UNKNOWN_SHARE: Final = 0.75
"""Share of all connections (0 to 1). While nodes hold more than this, unknown nodes (without useful work so far) are
refused.
"""

_LATER: Final = {hdrs.RETRY_AFTER: "1"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ConnectionLimits:
    """The limits of the connections to one port of the hub.

    Use `make` as protocol factory and `answering` as the first middleware; call `sweep` regularly.
    """

    def __init__(self, settings: ServerConfig) -> None:
        self.buffer = memoryview(bytearray(READ_BYTES))
        self.cuts: Counter[CloseReason] = Counter()
        self.handshakes = Turnstile(rate=HANDSHAKES_PER_S, most_waiting=MOST_HANDSHAKES)
        """Gives waiting TLS handshakes their turns, at most HANDSHAKES_PER_S."""
        self._connections = AddressRate(
            in_all=settings.connections_per_s, of_one=settings.connections_per_s_per_address, now=self.now()
        )
        self._requests = AddressRate(
            in_all=settings.requests_per_s, of_one=settings.requests_per_s_per_address, now=self.now()
        )
        self._settings = settings
        self._proxies = frozenset(settings.trusted_proxies)
        self._most = settings.max_connections
        self._all: dict[Connection, None] = {}
        self._waiting: dict[Connection, None] = {}
        """Connections of strangers (clients that have not authenticated) that wait for the client's next request, or on
        which the client still reads the last response; the longest waiting first.
        """
        self._under_way: dict[Connection, None] = {}
        """Running TLS handshakes, oldest first."""
        self._strangers_of: Counter[str] = Counter()
        """Number of connections of strangers (clients that have not authenticated) by address. `_nodes_of` counts
        nodes' connections by address, `_of_node` by node.
        """
        self._nodes_of: Counter[str] = Counter()
        self._of_node: Counter[str] = Counter()
        self._num_strangers = self._num_nodes = 0
        self._held: dict[Connection, int] = {}
        """Response bytes buffered for each connection of a stranger (a client that has not authenticated), least
        recently reported first. `_num_held` is their sum.
        """
        self._num_held = 0

    def now(self) -> float:
        return time.monotonic()

    @property
    def counts(self) -> dict[str, int]:
        """Number of closed connections and refused requests since the start, by reason."""
        return {cut.value: number for cut, number in self.cuts.items()}

    @property
    def num_open(self) -> int:
        return len(self._all)

    @property
    def num_strangers(self) -> int:
        return self._num_strangers

    def allow(self, descriptors: int) -> None:
        """Lower the limit of all connections to the number of file descriptors that the system allows."""
        self._most = min(self._most, descriptors)

    def make(self, server: web.Server, context: ssl.SSLContext | None = None) -> Connection:
        """Create the protocol of a new connection to `server`; with a `context` it uses TLS."""
        return Connection(self, server, context)

    def admits(self, host: str) -> bool:
        """Count a new connection from `host` against the rate limits. Return False if it exceeds one of them."""
        if host in self._proxies or self._connections.take(place_of(host), now=self.now()):
            return True
        self.cuts[CloseReason.TOO_FAST] += 1
        return False

    def opened(self, connection: Connection) -> bool:
        """Count a new connection. Return False if a limit is reached and closing another connection is not possible."""
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
        """Remove a closed or closing connection from all counts."""
        if connection in self._all:
            del self._all[connection]
            self._waiting.pop(connection, None)
            self._under_way.pop(connection, None)
            self._num_held -= self._held.pop(connection, 0)
            self._count(connection, None)

    def holds(self, connection: Connection, num_bytes: int) -> None:
        """Record how many response bytes wait for a stranger (a client that has not authenticated) to read them. Above
        the common limit for strangers, disconnect the stranger that was reported least recently.
        """
        self._num_held -= self._held.pop(connection, 0)
        if num_bytes and connection in self._all and not (connection.account and connection.account.node_id):
            self._held[connection] = num_bytes
            self._num_held += num_bytes
        while self._num_held > MOST_HELD_BYTES and len(self._held) > 1:
            self.cuts[CloseReason.TOO_MUCH_HELD] += 1
            self._abort(next(iter(self._held)))

    def _has_room(self, account: Account | None) -> bool:
        if len(self._all) >= self._most and not self._make_room(CloseReason.TOO_MANY):
            return False
        if account is None:
            return True
        if self._num_strangers >= self._settings.max_strangers and not self._make_room(CloseReason.TOO_MANY_STRANGERS):
            return False
        of_place = self._strangers_of[account.place]
        return of_place < self._settings.max_strangers_per_address or self._make_room(
            CloseReason.TOO_MANY_OF_ADDRESS, account.place
        )

    def _make_room(self, reason: CloseReason, place: str | None = None) -> bool:
        """Close one connection of a stranger (unauthenticated client) from this address, or from any address if None;
        return False if there is none to close.

        Prefers the oldest one that waits for a request. Otherwise takes the oldest one that is still reading its last
        response.
        """
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

    def cut(self, connection: Connection, reason: CloseReason) -> None:
        self.cuts[reason] += 1
        self._abort(connection)

    def _abort(self, connection: Connection) -> None:
        self.closed(connection)
        connection.transport.abort()

    def _wait(self, connection: Connection) -> None:
        if connection.account is not None and not connection.account.node_id:
            self._waiting[connection] = None

    def _count(self, connection: Connection, account: Account | None) -> None:
        """Count the connection for `account` and no longer for its previous account; None means for no account."""
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
        """Apply the limits to every request, also to unknown URLs. This middleware is the outermost one."""
        connection = _connection_of(request)
        if connection is None or connection not in self._all:
            return await handler(request)
        self._waiting.pop(connection, None)
        connection.began(request, self.now())
        try:
            self._count(connection, self._account_of(request, connection))
            if connection.account is not None and not self._requests.take(connection.account.place, now=self.now()):
                self.cuts[CloseReason.TOO_FAST_REQUESTS] += 1
                refusal = web.HTTPTooManyRequests(text="Too many requests. Try again soon.\n", headers=_LATER)
                if not connection.is_proxy:
                    # Close the connection: each request queued behind this one would cost another response.
                    refusal.force_close()
                raise refusal
            return await handler(request)
        finally:
            if connection in self._all:
                connection.answered(self.now())
                if connection.is_proxy:
                    self._count(connection, None)
                self._wait(connection)

    def _account_of(self, request: web.Request, connection: Connection) -> Account | None:
        """Return the account of a request that has not authenticated: its client's address.

        Raises HTTPTooManyRequests if a proxy's client is over its limit.
        """
        if not connection.is_proxy:
            return None if connection.account is None else Account(connection.account.place)
        try:
            place = place_of(client_ip(request, self._proxies))
        except RemoteProtocolError:  # The route reports this error if it needs the address.
            place = ""
        reason = None
        if self._num_strangers >= self._settings.max_strangers:
            reason = CloseReason.TOO_MANY_STRANGERS
        elif self._strangers_of[place] >= self._settings.max_strangers_per_address:
            reason = CloseReason.TOO_MANY_OF_ADDRESS
        if reason is not None:
            self.cuts[reason] += 1
            raise web.HTTPTooManyRequests(text="Too many requests at once. Try again soon.\n", headers=_LATER)
        return Account(place)

    def vouch_tenant(self, request: web.Request, tenant_id: str) -> None:
        """Count the request's connection for this tenant and no longer for a stranger.

        Raises RefusedError if the tenant or its address has too many connections.
        """
        self.vouch(request, f"tenant {tenant_id}", is_known=True, most=MOST_OF_TENANT)

    def vouch(self, request: web.Request, node_id: str, *, is_known: bool = False, most: int = MOST_OF_NODE) -> None:
        """Count the request's connection for this node and no longer for a stranger. The node may have `most`
        connections.

        Raises RefusedError if the node or its address has too many connections, or if the node is unknown and nodes
        hold UNKNOWN_SHARE of all connections.
        """
        connection = _connection_of(request)
        if connection is None or connection not in self._all or connection.account is None:
            return
        place, reason = connection.account.place, None
        if self._of_node[node_id] >= most:
            reason = CloseReason.TOO_MANY_OF_NODE
        elif self._nodes_of[place] >= self._settings.max_nodes_per_address:
            reason = CloseReason.TOO_MANY_OF_ADDRESS
        elif not is_known and self._num_nodes >= UNKNOWN_SHARE * self._most:
            reason = CloseReason.TOO_MANY_UNKNOWN
        if reason is not None:
            self.cuts[reason] += 1
            raise RefusedError(
                "This node, its address or all unknown nodes together have too many connections to the hub.",
                got=reason.value.replace("_", " "),
                do="Try again later, or ask the hub's operator for an invite or more server.max_nodes_per_address.",
                code=RefusalCode.TOO_SOON,
            )
        self._requests.give_back(place)
        self._count(connection, replace(connection.account, node_id=node_id))
        connection.go_on_reading()

    def count_frames(self, request: web.Request, flooded: Callable[[], None]) -> None:
        """Count websocket frames on this request's connection from now on (`Connection.count_frames`).

        Raises RemoteProtocolError if frames arrived before the handshake's response, which RFC 6455 (section 4.1)
        forbids: these frames would escape the count.
        """
        if request.protocol._message_tail:  # aiohttp's buffer of bytes behind the request head.
            raise RemoteProtocolError("A node sent frames before its handshake was answered.", do="Upgrade the node.")
        connection = _connection_of(request)
        if connection is not None:
            connection.count_frames(flooded)

    def began_handshake(self, connection: Connection) -> None:
        """Count a TLS handshake that starts. Abort the oldest one if more than MOST_UNDER_WAY run."""
        self._under_way[connection] = None
        if len(self._under_way) > MOST_UNDER_WAY:
            self.cut(next(iter(self._under_way)), CloseReason.TOO_MANY_HANDSHAKES)

    def ended_handshake(self, connection: Connection) -> None:
        self._under_way.pop(connection, None)

    def end_handshakes(self) -> None:
        """Abort unfinished TLS handshakes at shutdown: aiohttp does not know these connections yet."""
        for connection in tuple(self._all):
            if connection.stage is Stage.HANDSHAKE:
                self._abort(connection)

    def sweep(self) -> None:
        """Close connections that have been inactive for too long."""
        now = self.now()
        for connection in tuple(self._all):
            reason = connection.overdue(now)
            if reason is not None:
                if reason is not CloseReason.IDLE:
                    self.cuts[reason] += 1
                self._abort(connection)


def _connection_of(request: web.Request) -> Connection | None:
    protocol = None if request.transport is None else request.transport.get_protocol()
    return protocol if isinstance(protocol, Connection) else None


def _add(counter: Counter[str], key: str, change: int) -> None:
    counter[key] += change
    if not counter[key]:
        del counter[key]
