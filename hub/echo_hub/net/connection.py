"""One connection to the hub: the states it comes through, and how long it may do nothing in each.

Where the hub speaks TLS, its handshake comes first: a connection counts from its first packet on, its handshake waits
for a turn (`turnstile`), because it costs more than a request, and must be done within HANDSHAKE_S.

    UNREAD ──request──► ANSWERING ──handler is done──► BETWEEN ──next request──► ANSWERING
    at most HEAD_S      body within BODY_S;            the answer goes out, then it is idle:
    and HEAD_BYTES      what is sent moves             something moves within IDLE_S

What a client reads slowly goes on for as long as some of it arrives; a client that reads nothing is cut off. Once a
connection is a websocket, its small frames are counted before the HTTP library sees them (`count_frames`).
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
from echo_shared.frame_gate import FrameGate

HANDSHAKE_S: Final = 10.0
HEAD_S: Final = 20.0
HEAD_BYTES: Final = 16_384
BODY_S: Final = 30.0
IDLE_S: Final = 75.0
READ_BYTES: Final = 256 * 1024
"""At once, of what one connection has received."""


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


class Keeper(Protocol):
    """Who knows of all connections, and is told what becomes of each."""

    handshakes: Turnstile
    buffer: memoryview
    """READ_BYTES, shared by all: what is read is handed on before the next one reads."""

    def now(self) -> float:
        """Seconds."""
        ...

    def opened(self, connection: Connection) -> bool:
        """Whether there is room for it, or some could be made."""
        ...

    def closed(self, connection: Connection) -> None:
        """It is gone, or as good as that."""
        ...

    def cut(self, connection: Connection, reason: Cut) -> None:
        """Closes it at once, and counts why."""
        ...

    def began_handshake(self, connection: Connection) -> None:
        """Its turn has come, and it costs something now."""
        ...

    def ended_handshake(self, connection: Connection) -> None:
        """It speaks TLS from now on."""
        ...

    def holds(self, connection: Connection, num_bytes: int) -> None:
        """So much waits for its other end to read it."""
        ...


class Connection(asyncio.BufferedProtocol):
    """Stands between a transport and the HTTP library's own protocol, which it makes once there is room for it."""

    def __init__(
        self, keeper: Keeper, make: Callable[[], asyncio.Protocol], context: ssl.SSLContext | None = None
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
        self._keeper = keeper
        self._make = make
        self._context = context
        self._handshake: asyncio.Task[None] | None = None
        self._inner: asyncio.Protocol | None = None
        self._early = b""
        """What came with the end of the handshake, before this end knew that it was over."""
        self._num_read = 0
        """Bytes since its last request."""
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
        self._inner = self._make()
        self._inner.connection_made(self.transport)
        if self._early:
            self._inner.data_received(self._early)
            self._early = b""

    async def _shake_hands(self, context: ssl.SSLContext) -> None:
        """Until it is done, whoever closes the connection closes `transport`, and this ends by it."""
        socket, loop = self.transport, asyncio.get_running_loop()
        try:
            await self._keeper.handshakes.turn("" if self.account is None else self.account.place)
            if socket.is_closing():  # It has made room for another.
                return
            self._keeper.began_handshake(self)
            secure = await loop.start_tls(
                socket, self, context, server_side=True, ssl_handshake_timeout=2 * HANDSHAKE_S
            )
        except RefusedError:
            self._keeper.cut(self, Cut.TOO_MANY_HANDSHAKES)
        except OSError:  # It was no TLS, or its other end is gone: ssl.SSLError is one, too.
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
        """Of one buffer for all connections: what is read is handed on before the next one reads."""
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

    def count_frames(self, flooded: Callable[[], None]) -> None:
        """All that comes is frames of a websocket: too many small ones end the connection, and call `flooded`."""
        self._gate, self._flooded = FrameGate(now=self._keeper.now()), flooded

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
        turns.left(self.transport)
        self._keeper.closed(self)
        if self._inner is not None:
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """More waits to be sent than the transport likes: an answer is written at once, whatever its size."""
        self._keeper.holds(self, self.transport.get_write_buffer_size())
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._keeper.holds(self, 0)
        if self._inner is not None:
            self._inner.resume_writing()
