"""What connections may cost the hub: how many there are, of whom, and how long each may do nothing.

A connection is a *stranger's* until a request on it has shown that it is a node's (`vouch`): a proven websocket, or a
passkey. Strangers are limited in all and for each address, nodes' connections for each address and each node. For one
connection too many, the oldest makes room that waits for a request of its other end's: honest requests arrive within
moments, so who only holds connections loses them to who has something to say. Where none waits, the one that has been
reading its answer for longest does; where none reads, the newest is closed. The last quarter of all connections is for
strangers and for nodes that are known: whose work was of use, or that come by an invite. Fresh keys have the others.

Where the hub speaks TLS, its handshake comes first: a connection counts from its first packet on, its handshake waits
for a turn (`turnstile`), because it costs more than a request, and must be done within HANDSHAKE_S; for one too many
under way the oldest makes room. New connections and strangers' requests have a rate, too, in all and for each address
(`address_rate`).

    UNREAD ──request──► ANSWERING ──handler is done──► BETWEEN ──next request──► ANSWERING
    at most HEAD_S      body within BODY_S;            the answer goes out, then it is idle:
    and HEAD_BYTES      what is sent moves             something moves within IDLE_S

What a client reads slowly goes on for as long as some of it arrives; a client that reads nothing is cut off. What waits
in memory for strangers to read it has a limit, too: beyond it, the one that has read its answer for longest is cut off.

Connections from a trusted proxy are its clients': each request counts for the address that the proxy names, the
connection for nobody, and it may be idle.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import Final

from aiohttp import hdrs, web

from echo_hub.config.sections import ServerConfig
from echo_hub.net.address_rate import AddressRate
from echo_hub.net.client_address import client_ip, place_of
from echo_hub.net.progress import Progress, progress
from echo_hub.net.turnstile import Turnstile
from echo_shared.errors import RefusedError, RemoteProtocolError
from echo_shared.messages import RefusalCode

HANDSHAKE_S: Final = 10.0
HANDSHAKES_PER_S: Final = 250.0
MOST_HANDSHAKES: Final = 1_024
"""That wait for their turn."""
MOST_UNDER_WAY: Final = 256
"""Handshakes that have begun, each of which holds about 300 KB. At their rate of turns one has a second at least."""
HEAD_S: Final = 20.0
HEAD_BYTES: Final = 16_384
BODY_S: Final = 30.0
IDLE_S: Final = 75.0
SWEEP_S: Final = 5.0
MOST_OF_NODE: Final = 32
"""Connections of one node: a websocket, and fetching."""
MOST_HELD_BYTES: Final = 24 * 2**20
"""Of answers that strangers have not read yet."""
UNKNOWN_SHARE: Final = 0.75
"""Of all connections: when nodes hold so many, one that is not known finds no room."""
READ_BYTES: Final = 256 * 1024
"""At once, of what one connection has received."""

_LATER: Final = {hdrs.RETRY_AFTER: "1"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
"""What answers a request."""


class Cut(StrEnum):
    """Why a connection was closed, or a request turned away."""

    TOO_MANY = "too_many"
    TOO_MANY_STRANGERS = "too_many_strangers"
    TOO_MANY_OF_ADDRESS = "too_many_of_address"
    TOO_MANY_OF_NODE = "too_many_of_node"
    TOO_MANY_UNKNOWN = "too_many_unknown"
    TOO_FAST = "too_fast"
    """The limit for all addresses together, or for one, as in the next two."""
    TOO_FAST_REQUESTS = "too_fast_requests"
    TOO_MANY_HANDSHAKES = "too_many_handshakes"
    HANDSHAKE_TOO_LATE = "handshake_too_late"
    HEAD_TOO_LATE = "head_too_late"
    BODY_TOO_LATE = "body_too_late"
    NOT_READING = "not_reading"
    TOO_MUCH_HELD = "too_much_held"
    IDLE = "idle"
    """No fault: not counted."""


@dataclass(frozen=True, slots=True)
class Account:
    """An address, and the node there that has shown who it is; no node, for strangers."""

    place: str
    node_id: str = ""


class Stage(Enum):
    HANDSHAKE = "handshake"
    UNREAD = "unread"
    ANSWERING = "answering"
    BETWEEN = "between"


class Connection(asyncio.BufferedProtocol):
    """Stands between a transport and the HTTP library's own protocol, which it makes once there is room for it."""

    def __init__(
        self, limits: Limits, make: Callable[[], asyncio.Protocol], context: ssl.SSLContext | None = None
    ) -> None:
        self.stage = Stage.HANDSHAKE if context else Stage.UNREAD
        self.is_proxy = False
        self.account: Account | None = None
        """For whom it counts; None = for nobody but all."""
        self.transport: asyncio.Transport
        self._since = 0.0
        """When it came into its stage, or last moved."""
        self._seen: Progress | None = None
        self._request: web.Request | None = None
        """The one that is being answered."""
        self._limits = limits
        self._make = make
        self._context = context
        self._handshake: asyncio.Task[None] | None = None
        self._inner: asyncio.Protocol | None = None
        self._early = b""
        """What came with the end of the handshake, before this end knew that it was over."""
        self._num_read = 0
        """Bytes since its last request."""
        self._is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self._since = transport, self._limits.now()
        if not self._limits.opened(self):
            transport.abort()
        elif self._context is None:
            self._begin()
        else:
            transport.pause_reading()
            self._handshake = asyncio.create_task(self._shake_hands(self._context), name="TLS handshake")

    def _begin(self) -> None:
        self._inner = self._make()
        self._inner.connection_made(self.transport)
        if self._early:
            self._inner.data_received(self._early)
            self._early = b""

    async def _shake_hands(self, context: ssl.SSLContext) -> None:
        """Until it is done, whoever closes the connection closes `transport`, and this ends by it."""
        socket, loop = self.transport, asyncio.get_running_loop()
        try:
            await self._limits.handshakes.turn("" if self.account is None else self.account.place)
            if socket.is_closing():  # It has made room for another.
                return
            self._limits.began_handshake(self)
            secure = await loop.start_tls(
                socket, self, context, server_side=True, ssl_handshake_timeout=2 * HANDSHAKE_S
            )
        except RefusedError:
            self._limits.cut(self, Cut.TOO_MANY_HANDSHAKES)
        except OSError:  # It was no TLS, or its other end is gone: ssl.SSLError is one, too.
            self._limits.closed(self)
            socket.abort()
        else:
            if secure is None or socket.is_closing():
                self._limits.closed(self)
                return
            self._limits.ended_handshake(self)
            self.transport, self.stage, self._since = secure, Stage.UNREAD, self._limits.now()
            self._begin()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Of one buffer for all connections: what is read is handed on before the next one reads."""
        return self._limits.buffer[: READ_BYTES if self._may_send_more else max(1, HEAD_BYTES - self._num_read)]

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._limits.buffer[:nbytes])
        self._num_read += nbytes
        if self._inner is None:
            self._early += data
            return
        self._inner.data_received(data)
        if not self._may_send_more and self._num_read >= HEAD_BYTES and not self.transport.is_closing():
            self.transport.pause_reading()  # Until its request is there, if it ever is.
            self._is_paused = True

    @property
    def _may_send_more(self) -> bool:
        """Than the head of a request: a node, and whoever has a body to send, which the library reads as it is used."""
        if self.account is not None and self.account.node_id:
            return True
        return self._request is not None and not self._request.content.is_eof()

    def began(self, request: web.Request, now: float) -> None:
        """Its other end has sent a request."""
        self.stage, self._request = Stage.ANSWERING, request
        self._since, self._seen = now, None
        self.go_on_reading()

    def go_on_reading(self) -> None:
        """What has been read has been of use."""
        self._num_read = 0
        if self._is_paused and not self.transport.is_closing():
            self._is_paused = False
            self.transport.resume_reading()

    def answered(self, now: float) -> None:
        """The request's handler is done; its answer may still be on its way."""
        self.stage, self._request = Stage.BETWEEN, None
        self._since, self._seen = now, None

    def overdue(self, now: float) -> Cut | None:
        """Why it is to be closed; called again and again, as what has moved since the last call counts."""
        if self.stage is Stage.HANDSHAKE:
            return Cut.HANDSHAKE_TOO_LATE if now - self._since > HANDSHAKE_S else None
        if self.stage is Stage.UNREAD:
            return Cut.HEAD_TOO_LATE if now - self._since > HEAD_S and not self.is_proxy else None
        if self._request is not None and not self._request.content.is_eof():
            return Cut.BODY_TOO_LATE if now - self._since > BODY_S else None
        if self.stage is Stage.ANSWERING and self.account is not None and self.account.node_id:
            return None  # A websocket: the gateway has deadlines of its own.
        seen, self._seen = self._seen, progress(self.transport)
        if self._seen != seen:
            self._since = now
        if now - self._since <= IDLE_S:
            return None
        if self._seen is not None:
            return Cut.NOT_READING
        return Cut.IDLE if self.stage is Stage.BETWEEN and not self.is_proxy else None

    def eof_received(self) -> bool | None:
        return None if self._inner is None else self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.closed(self)
        if self._inner is not None:
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """More waits to be sent than the transport likes: an answer is written at once, whatever its size."""
        self._limits.holds(self, self.transport.get_write_buffer_size())
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._limits.holds(self, 0)
        if self._inner is not None:
            self._inner.resume_writing()


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
