"""One TCP connection to the hub: its stages, and how long it may stay inactive in each.

If the hub uses TLS, the handshake comes first. A connection counts from its first packet on. Its handshake waits for a
turn (`turnstile`), because a handshake costs more than a request, and must finish within HANDSHAKE_S.

    UNREAD ──request──► ANSWERING ──handler is done──► BETWEEN ──next request──► ANSWERING
    at most HEAD_S      body within BODY_S;            the response is sent, then idle:
    and HEAD_BYTES      the response makes progress    progress within IDLE_S

A slow reader may continue as long as data arrives; a client that reads nothing is disconnected. On a websocket, small
frames are counted before aiohttp sees them (`count_frames`).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final, Protocol

from aiohttp import web

from echo_hub.net import turns
from echo_hub.net.progress import Progress, progress
from echo_hub.net.turnstile import Turnstile
from echo_shared.errors import RefusedError
from echo_shared.wire.frame_gate import FrameGate

HANDSHAKE_S: Final = 10.0
HEAD_S: Final = 20.0
HEAD_BYTES: Final = 16_384
BODY_S: Final = 30.0
IDLE_S: Final = 75.0
READ_BYTES: Final = 256 * 1024
"""Size of the read buffer, in bytes: one read takes at most this from a connection."""


class CloseReason(StrEnum):
    """Reason for closing a connection or refusing a request. "Strangers" have not authenticated; "unknown" nodes have
    done no useful work yet."""

    TOO_MANY = "too_many"
    TOO_MANY_STRANGERS = "too_many_strangers"
    TOO_MANY_OF_ADDRESS = "too_many_of_address"
    TOO_MANY_OF_NODE = "too_many_of_node"
    TOO_MANY_UNKNOWN = "too_many_unknown"
    TOO_FAST = "too_fast"
    """New connections exceed the rate limit of their address, or the limit of all addresses together."""
    TOO_FAST_REQUESTS = "too_fast_requests"
    TOO_MANY_HANDSHAKES = "too_many_handshakes"
    HANDSHAKE_TOO_LATE = "handshake_too_late"
    HEAD_TOO_LATE = "head_too_late"
    BODY_TOO_LATE = "body_too_late"
    NOT_READING = "not_reading"
    TOO_MUCH_HELD = "too_much_held"
    IDLE = "idle"
    """A normal end of an idle connection: not a fault, and not counted."""


@dataclass(frozen=True, slots=True)
class Account:
    """The address that a connection counts for, and its authenticated node; `node_id` is "" for a stranger (a client
    that has not authenticated)."""

    place: str
    node_id: str = ""


class Stage(Enum):
    HANDSHAKE = "handshake"
    UNREAD = "unread"
    ANSWERING = "answering"
    BETWEEN = "between"


class Keeper(Protocol):
    """Owner of all connections; each connection reports its changes to it."""

    handshakes: Turnstile
    buffer: memoryview
    """Read buffer of READ_BYTES, shared by all connections: data is passed on before the next connection reads."""

    def now(self) -> float:
        """Return the time in seconds."""
        ...

    def opened(self, connection: Connection) -> bool:
        """Return True if the connection may stay, after closing another one if necessary."""
        ...

    def closed(self, connection: Connection) -> None: ...

    def cut(self, connection: Connection, reason: CloseReason) -> None: ...

    def began_handshake(self, connection: Connection) -> None: ...

    def ended_handshake(self, connection: Connection) -> None: ...

    def holds(self, connection: Connection, num_bytes: int) -> None:
        """Report how many response bytes wait in memory for the client to read them."""
        ...


class Connection(asyncio.BufferedProtocol):
    """Passes data between the transport and aiohttp's protocol, which is created once the connection is admitted."""

    def __init__(self, keeper: Keeper, server: web.Server, context: ssl.SSLContext | None = None) -> None:
        self.stage = Stage.HANDSHAKE if context else Stage.UNREAD
        self.is_proxy = False
        self.account: Account | None = None
        """Address and node that the connection counts for; None if it counts only in the total."""
        self.transport: asyncio.Transport
        self._since = 0.0
        """Time when the connection entered its stage or last made progress."""
        self._seen: Progress | None = None
        self._request: web.Request | None = None
        self._keeper = keeper
        self._server = server
        self._context = context
        self._handshake: asyncio.Task[None] | None = None
        self._inner: asyncio.Protocol | None = None
        self._early = b""
        """Bytes that arrived with the last handshake packet, before the hub knew that the handshake was over."""
        self._num_read = 0
        """Number of bytes read since the connection's last complete request."""
        self._is_paused = False
        self._gate: FrameGate | None = None
        self._flooded: Callable[[], None] = lambda: None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self._since = transport, self._keeper.now()
        turns.came(transport)
        if not self._keeper.opened(self):
            transport.abort()
        elif self._context is None:
            self._begin()
        else:
            transport.pause_reading()
            self._handshake = asyncio.create_task(self._shake_hands(self._context), name="TLS handshake")

    def _begin(self) -> None:
        self._inner = self._server()
        self._inner.connection_made(self.transport)
        if self._early:
            self._inner.data_received(self._early)
            self._early = b""

    async def _shake_hands(self, context: ssl.SSLContext) -> None:
        """Do the TLS handshake. To close the connection meanwhile, close `transport`: that ends this task."""
        socket, loop = self.transport, asyncio.get_running_loop()
        try:
            await self._keeper.handshakes.turn("" if self.account is None else self.account.place)
            if socket.is_closing():  # The hub closed it meanwhile to make place for another connection.
                return
            self._keeper.began_handshake(self)
            secure = await loop.start_tls(
                socket, self, context, server_side=True, ssl_handshake_timeout=2 * HANDSHAKE_S
            )
        except RefusedError:
            self._keeper.cut(self, CloseReason.TOO_MANY_HANDSHAKES)
        except OSError:  # The client does not speak TLS, or it has disconnected; ssl.SSLError is an OSError.
            self._keeper.closed(self)
            socket.abort()
        else:
            if secure is None or socket.is_closing():
                self._keeper.closed(self)
                return
            self._keeper.ended_handshake(self)
            self.transport, self.stage, self._since = secure, Stage.UNREAD, self._keeper.now()
            self._begin()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the shared read buffer, shortened to the bytes that this connection may still send before its request
        must be complete."""
        return self._keeper.buffer[: READ_BYTES if self._may_send_more else max(1, HEAD_BYTES - self._num_read)]

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._keeper.buffer[:nbytes])
        self._num_read += nbytes
        if self._inner is None:
            self._early += data
            return
        if self._gate is not None and not self._gate.admits(data, now=self._keeper.now()):
            self.transport.abort()
            self._flooded()
            return
        self._inner.data_received(data)
        if not self._may_send_more and self._num_read >= HEAD_BYTES and not self.transport.is_closing():
            self.transport.pause_reading()  # Reading resumes when the request is complete.
            self._is_paused = True

    @property
    def _may_send_more(self) -> bool:
        """True if the client may send more than a request head: a node, or a client whose request body is incomplete.

        aiohttp reads a body only as its handler consumes it.
        """
        if self.account is not None and self.account.node_id:
            return True
        return self._request is not None and not self._request.content.is_eof()

    def began(self, request: web.Request, now: float) -> None:
        self.stage, self._request = Stage.ANSWERING, request
        self._since, self._seen = now, None
        self.go_on_reading()

    def go_on_reading(self) -> None:
        """Reset the byte count and resume reading, because the bytes read so far formed a valid request."""
        self._num_read = 0
        if self._is_paused and not self.transport.is_closing():
            self._is_paused = False
            self.transport.resume_reading()

    def count_frames(self, flooded: Callable[[], None]) -> None:
        """Treat all further data as websocket frames: too many small ones abort the connection and call `flooded`."""
        self._gate, self._flooded = FrameGate(now=self._keeper.now()), flooded

    def answered(self, now: float) -> None:
        """Record that the handler has answered the request. The response may still be in the write buffer."""
        self.stage, self._request = Stage.BETWEEN, None
        self._since, self._seen = now, None

    def overdue(self, now: float) -> CloseReason | None:
        """Return why the connection must be closed, or None. Call it regularly: progress is measured from one call to
        the next."""
        if self.stage is Stage.HANDSHAKE:
            return CloseReason.HANDSHAKE_TOO_LATE if now - self._since > HANDSHAKE_S else None
        if self.stage is Stage.UNREAD:
            return CloseReason.HEAD_TOO_LATE if now - self._since > HEAD_S and not self.is_proxy else None
        if self._request is not None and not self._request.content.is_eof():
            return CloseReason.BODY_TOO_LATE if now - self._since > BODY_S else None
        if self.stage is Stage.ANSWERING and self.account is not None and self.account.node_id:
            return None  # A node's websocket: the gateway enforces the deadlines of nodes.
        seen, self._seen = self._seen, progress(self.transport)
        if self._seen != seen:
            self._since = now
        if now - self._since <= IDLE_S:
            return None
        if self._seen is not None:
            return CloseReason.NOT_READING
        return CloseReason.IDLE if self.stage is Stage.BETWEEN and not self.is_proxy else None

    def eof_received(self) -> bool | None:
        return None if self._inner is None else self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        turns.left(self.transport)
        self._keeper.closed(self)
        if self._inner is not None:
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """Report the number of bytes in the write buffer to the keeper of all connections, which limits these bytes. A
        buffer may grow large, because aiohttp puts a whole response into it.
        """
        self._keeper.holds(self, self.transport.get_write_buffer_size())
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._keeper.holds(self, 0)
        if self._inner is not None:
            self._inner.resume_writing()
