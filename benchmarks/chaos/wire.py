"""A relay between nodes and hub ("line"), which delays, repeats and swaps messages.

Nodes connect to the relay's address. Once a connection is a websocket (RFC 6455), the relay knows where frames end. So
it can deliver whole messages twice or in another order, as a faulty middlebox or a node's retry would. The relay also
records every rollout that the hub acknowledged to a node (`acknowledged`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from echo_shared.errors import CodecError
from echo_shared.wire.codec import decode_from_hub
from echo_shared.wire.messages import Receipts, ReceiptState

HELD_S: Final = 0.2
"""Maximum seconds for which a message waits to be swapped with the next one."""
CHUNK: Final = 65_536
END_OF_HEAD: Final = b"\r\n\r\n"
WHOLE_MESSAGE: Final = 0x82
"""First byte of a frame that holds a whole binary message."""


class Frames:
    """Splits the bytes of one direction of a connection into websocket frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._is_websocket: bool | None = None
        """True if the connection has become a websocket; None until its HTTP head is complete."""

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the frames that are now complete, in order."""
        if self._is_websocket is False:
            return [data]
        self._buffer += data
        whole = []
        if self._is_websocket is None:
            head, mark, _ = self._buffer.partition(END_OF_HEAD)
            if not mark:
                return []
            first, *headers = bytes(head).lower().split(b"\r\n")
            is_upgrade = any(header.replace(b" ", b"") == b"upgrade:websocket" for header in headers)
            is_refused = first.startswith(b"http/") and b" 101 " not in first + b" "
            self._is_websocket = is_upgrade and not is_refused
            whole.append(self._take(len(head) + len(mark)))
            if not self._is_websocket:
                whole.append(self._take(len(self._buffer)))
        while self._is_websocket and (size := self._frame_bytes()):
            whole.append(self._take(size))
        return [one for one in whole if one]

    def _take(self, size: int) -> bytes:
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def _frame_bytes(self) -> int:
        """Return the size of the first frame in the buffer; 0 if the frame is incomplete."""
        start, size = _body(self._buffer)
        return start + size if start and len(self._buffer) >= start + size else 0


def _body(frame: bytes | bytearray) -> tuple[int, int]:
    """Return start and size of a frame's payload; 0, 0 if its head is incomplete."""
    if len(frame) < 2:
        return 0, 0
    size, start = frame[1] & 0x7F, 2
    extended = {126: 2, 127: 8}.get(size, 0)
    if len(frame) < start + extended:
        return 0, 0
    if extended:
        size = int.from_bytes(frame[2 : 2 + extended], "big")
    start += extended + (4 if frame[1] & 0x80 else 0)
    return start, size


class Wire:
    """The relay, which can delay, repeat and swap messages. The hub listens at `hub_port` of loopback."""

    def __init__(self, hub_port: int, chance: random.Random) -> None:
        self.hub_port = hub_port
        self._chance = chance
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.delay_s = 0.0
        self.twice = 0.0
        """Share of messages that are delivered twice."""
        self.swapped = 0.0
        """Share of messages that are delivered after the message that followed them."""
        self.acknowledged: set[str] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Relay connections from nodes to the hub during the block. Yields the URL at which nodes connect."""
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{self.port}"
        finally:
            server.close()
            self.cut()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def cut(self) -> int:
        count = len(self._writers)
        for writer in self._writers:
            writer.transport.abort()
        return count

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = [writer]
        self._writers.add(writer)
        try:
            to_hub = await asyncio.open_connection("127.0.0.1", self.hub_port)
            writers.append(to_hub[1])
            self._writers.add(to_hub[1])
            await asyncio.gather(
                self._direction(reader, to_hub[1], from_hub=False), self._direction(to_hub[0], writer, from_hub=True)
            )
        except OSError:  # The hub is away, or one end has closed the connection.
            pass
        finally:
            for one in writers:
                self._writers.discard(one)
                one.transport.abort()
            self._tasks.discard(task)

    async def _direction(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, from_hub: bool) -> None:
        frames, under_way = Frames(), asyncio.Queue[tuple[float, bytes | None]](maxsize=256)
        clock = asyncio.get_running_loop().time

        async def bring() -> None:
            while True:
                due, frame = await under_way.get()
                await asyncio.sleep(max(0.0, due - clock()))
                if frame is None:
                    if writer.can_write_eof():
                        writer.write_eof()
                    return
                writer.write(frame)
                await writer.drain()

        bringing = asyncio.create_task(bring())
        held: bytes | None = None
        try:
            while True:
                try:
                    async with asyncio.timeout(HELD_S if held else None):
                        data = await reader.read(CHUNK)
                except TimeoutError:
                    assert held is not None
                    await under_way.put((clock() + self.delay_s, held))
                    held = None
                    continue
                sent: list[bytes] = []
                for frame in frames.feed(data) if data else []:
                    if from_hub:
                        self._witness(frame)
                    if held is None and frame[0] == WHOLE_MESSAGE and self._chance.random() < self.swapped:
                        held = frame
                        continue
                    copies = 1 + (frame[0] == WHOLE_MESSAGE and self._chance.random() < self.twice)
                    sent += [frame] * copies
                    if held is not None:
                        sent.append(held)
                        held = None
                if held is not None and not data:
                    sent.append(held)
                for frame in sent:
                    await under_way.put((clock() + self.delay_s, frame))
                if not data:
                    await under_way.put((clock() + self.delay_s, None))
                    break
            await bringing
        finally:
            bringing.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await bringing

    def _witness(self, frame: bytes) -> None:
        if frame[0] != WHOLE_MESSAGE:
            return
        try:
            message = decode_from_hub(frame[_body(frame)[0] :])
        except CodecError:
            return  # Not a message: the head of an HTTP answer can begin like one.
        if isinstance(message, Receipts):
            self.acknowledged.update(
                receipt.rollout_id
                for receipt in message.receipts
                if receipt.state not in (ReceiptState.LEASED, ReceiptState.DROPPED)
            )
