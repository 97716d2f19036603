"""The hub's end of one node's websocket: what is said to the node, in order, and how the connection ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from echo_hub.net.send_queue import SendQueue
from echo_shared.congestion import LossPool, LossWatch
from echo_shared.sessions import HubSession
from echo_shared.sockets import keep_unsent_short

log = logging.getLogger(__name__)

FAREWELL_S: Final = 2.0
"""How long a node has to take the hub's last word."""
UNSENT_BYTES: Final = 8 * 1024
"""Unsent bytes that the system has taken for one node: a message waits behind so much of what was pushed, and one
push."""

AT_ONCE: Final = 64
"""Connections that are written to before others have their turn."""


class Together:
    """What is said to nodes goes out once the loop's present work is done: of an ack and the lease that it makes room
    for, each would cost as much as both."""

    def __init__(self) -> None:
        self._waiting: list[NodeConnection] = []

    def add(self, connection: NodeConnection) -> None:
        """It has something to send."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._soon)
        self._waiting.append(connection)

    def _soon(self) -> None:
        # Behind what the same work has woken: leases are put together by a task of their own.
        asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        waiting, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
        for connection in waiting:
            connection.write_kept()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._send)


class NodeConnection:
    """One node's websocket."""

    def __init__(
        self,
        socket: web.WebSocketResponse,
        session: HubSession,
        transport: asyncio.Transport | None,
        together: Together,
        losses: LossPool,
        place: str,
    ) -> None:
        """`losses`: of all nodes' connections; this one is with `place`."""
        self.socket = socket
        self.session = session
        self.queue = SendQueue()
        self.writer: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._stream: AbstractStreamWriter | None = None
        self._ping = b""
        """The newest that was not answered (RFC 6455, section 5.5.3: the others need not be)."""
        self._answering: asyncio.Task[None] | None = None
        self._transport = transport
        self._together = together
        self._kept: list[bytes] = []
        """Messages that `together` sends; those that follow go behind them."""
        self._watch = LossWatch(transport, losses, place)
        if transport is not None:
            # Not 0: by TLS, asyncio would then take an empty buffer for a full one, and writing would wait for reading.
            transport.set_write_buffer_limits(high=1)
            keep_unsent_short(transport, UNSENT_BYTES)

    def send(self, frame: bytes) -> bool:
        """Has it written with what else the loop's present work says to the node, where nothing is before it, which
        saves a turn of the writer's; else queues it. False when the queue is full."""
        transport = self._transport
        if self._kept:
            self._kept += (binary_header(len(frame)), frame)
        elif transport is None or not self.queue.is_idle or self.socket.closed or transport.get_write_buffer_size():
            return self.queue.put(frame)
        elif not transport.is_closing():
            self._kept += (binary_header(len(frame)), frame)
            self._together.add(self)
        return True

    def write_kept(self) -> None:
        """Writes what was kept to be sent together."""
        kept, self._kept = self._kept, []
        if kept and self._transport is not None and not self._transport.is_closing() and not self.socket.closed:
            self._transport.write(b"".join(kept))

    def start_writing(self, stream: AbstractStreamWriter, node_id: str) -> None:
        """Begins to send what is queued to the node."""
        self._stream = stream
        self.writer = asyncio.create_task(self._write(stream), name=f"write to {node_id}")

    def answer_ping(self, payload: bytes) -> None:
        """Answers at once, or once what was sent before has gone: one answer waits, to the newest ping."""
        self._ping = payload
        if self._answering is not None or self._transport is None or self._stream is None:
            return
        if self._transport.get_write_buffer_size():
            self._answering = asyncio.create_task(self._answer_later(self._stream), name="pong")
        else:
            self._pong()

    async def _answer_later(self, stream: AbstractStreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # Its reader sees that, too.
            await stream.drain()
        self._answering = None
        self._pong()

    def _pong(self) -> None:
        if self._transport is not None and not self._transport.is_closing() and not self.socket.closed:
            self._transport.write(bytes((0x8A, len(self._ping))) + self._ping)

    async def _write(self, stream: AbstractStreamWriter) -> None:
        """Writes until the queue ends or the connection breaks, which its reader sees as well. Never cancel what may
        wait for room in a connection: all that do wait on one future of aiohttp's, and are cancelled with it."""
        try:
            while (frame := await self.queue.next()) is not None:
                await self.socket.send_bytes(frame)
                await stream.drain()
                self._watch.sent(len(frame))
        except ConnectionError:
            return
        except Exception:
            log.exception("nothing more can be sent to a node")
            self.abort()

    async def dismiss(self, last_frame: bytes) -> None:
        """Sends the hub's last word and ends the connection, whether the node takes it or not."""
        await self._close(last_frame)

    async def end(self) -> None:
        """Returns once nothing is left of the connection; a last word that is on its way may arrive."""
        self.queue.end()
        await self._close(None)
        self.abort()
        if ending := [task for task in (self.writer, self._answering) if task is not None]:
            await asyncio.wait(ending)

    async def _close(self, last_frame: bytes | None) -> None:
        """Only the first call counts."""
        self.write_kept()
        if self._closing is None:
            self._closing = asyncio.create_task(self._say_and_close(last_frame))
        try:
            await asyncio.wait([self._closing], timeout=FAREWELL_S)
        finally:
            if not self._closing.done():
                self.abort()  # Which ends it.

    async def _say_and_close(self, last_frame: bytes | None) -> None:
        with contextlib.suppress(ConnectionError):  # Then it has ended.
            if last_frame is not None:
                await self.socket.send_bytes(last_frame)
            await self.socket.close()

    def abort(self) -> bool:
        """Ends the connection at once; False when it was ending already."""
        if self._transport is None:
            return False
        was_ending = self._transport.is_closing()
        self._transport.abort()
        return not was_ending


def binary_header(num_bytes: int) -> bytes:
    """Of a server's frame that holds a whole message (RFC 6455, section 5.2): final, binary, not masked."""
    if num_bytes < 126:
        return bytes((0x82, num_bytes))
    if num_bytes < 2**16:
        return b"\x82\x7e" + num_bytes.to_bytes(2)
    return b"\x82\x7f" + num_bytes.to_bytes(8)
