"""The hub's end of one node's websocket: ordered sending, and closing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from echo_hub.net.send_queue import SendQueue
from echo_shared.wire.congestion import LossPool, LossWatch
from echo_shared.wire.sessions import HubSession
from echo_shared.wire.sockets import keep_unsent_short

log = logging.getLogger(__name__)

FAREWELL_S: Final = 2.0
"""Longest time for a node to receive the hub's last message, in seconds."""
UNSENT_BYTES: Final = 8 * 1024
"""Kernel limit of unsent bytes per node. So a message waits at most for this many bytes of earlier pushes (pieces of
artefacts), plus one whole push."""

AT_ONCE: Final = 64
"""Number of connections written to before the event loop does other work."""


class Together:
    """Collects the frames that one turn of the event loop produces for each node, and writes each node's frames
    together.

    An acknowledgement and the lease after it then take one system call instead of two equally expensive ones.
    """

    def __init__(self) -> None:
        self._waiting: list[NodeConnection] = []

    def add(self, connection: NodeConnection) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._soon)
        self._waiting.append(connection)

    def _soon(self) -> None:
        # Wait one more turn of the loop: the task that assembles leases is woken in this turn, and its frames belong to
        # the batch.
        asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        waiting, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
        for connection in waiting:
            connection.write_kept()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._send)


class NodeConnection:
    def __init__(
        self,
        socket: web.WebSocketResponse,
        session: HubSession,
        transport: asyncio.Transport | None,
        together: Together,
        losses: LossPool,
        place: str,
    ) -> None:
        """`losses`: detects TCP losses over all node connections together; losses on this one count for the address
        `place`."""
        self.socket = socket
        self.session = session
        self.queue = SendQueue()
        self.writer: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._stream: AbstractStreamWriter | None = None
        self._ping = b""
        """The newest unanswered ping; RFC 6455, section 5.5.3, allows ignoring older ones."""
        self._answering: asyncio.Task[None] | None = None
        self._transport = transport
        self._together = together
        self._kept: list[bytes] = []
        """Frames that `together` will send in its next batch; `send` appends further ones."""
        self._watch = LossWatch(transport, losses, place)
        if transport is not None:
            # The limit is not 0: with TLS, asyncio would treat an empty buffer as full, and writing would wait for
            # reading.
            transport.set_write_buffer_limits(high=1)
            keep_unsent_short(transport, UNSENT_BYTES)

    def send(self, frame: bytes) -> bool:
        """Send a frame; return False if the queue is full.

        If nothing is queued, the frame joins the current batch (`Together`), so that the writer task need not be woken.
        Otherwise the frame is queued.
        """
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
        kept, self._kept = self._kept, []
        if kept and self._transport is not None and not self._transport.is_closing() and not self.socket.closed:
            self._transport.write(b"".join(kept))

    def start_writing(self, stream: AbstractStreamWriter, node_id: str) -> None:
        self._stream = stream
        self.writer = asyncio.create_task(self._write(stream), name=f"write to {node_id}")

    def answer_ping(self, payload: bytes) -> None:
        """Answer a ping at once, or when the write buffer is empty. Only the newest ping is answered."""
        self._ping = payload
        if self._answering is not None or self._transport is None or self._stream is None:
            return
        if self._transport.get_write_buffer_size():
            self._answering = asyncio.create_task(self._answer_later(self._stream), name="pong")
        else:
            self._pong()

    async def _answer_later(self, stream: AbstractStreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # The reader task handles the broken connection.
            await stream.drain()
        self._answering = None
        self._pong()

    def _pong(self) -> None:
        if self._transport is not None and not self._transport.is_closing() and not self.socket.closed:
            self._transport.write(bytes((0x8A, len(self._ping))) + self._ping)

    async def _write(self, stream: AbstractStreamWriter) -> None:
        """Write queued frames until the queue ends or the connection breaks; the reader task handles a broken
        connection.

        Never cancel a task that may wait in `drain`: all waiters share one aiohttp future and would be cancelled with
        it.
        """
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
        """Send the hub's last message and close the connection, at the latest after FAREWELL_S if the node does not
        read."""
        await self._close(last_frame)

    async def end(self) -> None:
        """Close the connection and wait for its tasks. A last message that is being sent may still arrive."""
        self.queue.end()
        await self._close(None)
        self.abort()
        if ending := [task for task in (self.writer, self._answering) if task is not None]:
            await asyncio.wait(ending)

    async def _close(self, last_frame: bytes | None) -> None:
        """Close the connection. Only the first call's `last_frame` is sent."""
        self.write_kept()
        if self._closing is None:
            self._closing = asyncio.create_task(self._say_and_close(last_frame))
        try:
            await asyncio.wait([self._closing], timeout=FAREWELL_S)
        finally:
            if not self._closing.done():
                self.abort()  # The abort also ends the closing task.

    async def _say_and_close(self, last_frame: bytes | None) -> None:
        with contextlib.suppress(ConnectionError):  # The connection has already ended.
            if last_frame is not None:
                await self.socket.send_bytes(last_frame)
            await self.socket.close()

    def abort(self) -> bool:
        """Abort the connection at once; return False if it was already closing."""
        if self._transport is None:
            return False
        was_ending = self._transport.is_closing()
        self._transport.abort()
        return not was_ending


def binary_header(num_bytes: int) -> bytes:
    """Return the header of a server frame that holds one whole message (RFC 6455, 5.2): final, binary, unmasked."""
    if num_bytes < 126:
        return bytes((0x82, num_bytes))
    if num_bytes < 2**16:
        return b"\x82\x7e" + num_bytes.to_bytes(2)
    return b"\x82\x7f" + num_bytes.to_bytes(8)
