"""The chaos benchmark's relay between nodes and hub recognises websocket frames (RFC 6455) however TCP splits them. It
relays a real websocket with and without inflicted faults.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import websockets
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

from benchmarks.chaos.wire import Frames, Wire
from echo_shared.wire.codec import encode
from echo_shared.wire.messages import DropReason, Receipt, Receipts, ReceiptState

REQUEST = b"GET /node HTTP/1.1\r\nHost: x\r\nUpgrade: WebSocket\r\nConnection: Upgrade\r\n\r\n"
ANSWER = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n"
SHORT = b"\x82\x03abc"
MASKED = b"\x82\x83\x01\x02\x03\x04xyz"
LONG = b"\x82\x7e\x01\x00" + bytes(256)
HUGE = b"\x82\x7f" + (70_000).to_bytes(8, "big") + bytes(70_000)


@pytest.mark.parametrize("at_once", [1, 3, 7, 10**6])
@pytest.mark.parametrize("head", [REQUEST, ANSWER])
def test_bytes_are_divided_at_the_ends_of_frames(head: bytes, at_once: int) -> None:
    frames, sent = Frames(), [head, SHORT, MASKED, LONG, SHORT, HUGE, SHORT]
    data = b"".join(sent)
    found = [one for start in range(0, len(data), at_once) for one in frames.feed(data[start : start + at_once])]
    assert found == sent


def test_other_protocols_pass_unchanged() -> None:
    refused = b"HTTP/1.1 401 Unauthorized\r\nUpgrade: websocket\r\n\r\n"
    for head in (b"GET /artefact HTTP/1.1\r\n\r\n", refused):
        frames = Frames()
        assert b"".join(frames.feed(head + SHORT[:2])) == head + SHORT[:2]
        assert frames.feed(b"any bytes") == [b"any bytes"]


@asynccontextmanager
async def line(seed: int = 0) -> AsyncIterator[tuple[Wire, str, list[bytes]]]:
    """Yield a relay in front of an echo server, its URL, and the list of messages that the server has received."""
    heard: list[bytes] = []

    async def say_back(connection: ServerConnection) -> None:
        async for message in connection:
            heard.append(bytes(message))  # type: ignore[arg-type]
            await connection.send(message)

    async with serve(say_back, "127.0.0.1", 0, compression=None) as server:
        wire = Wire(next(iter(server.sockets)).getsockname()[1], random.Random(seed))
        async with wire.open() as url:
            yield wire, url.replace("http", "ws", 1), heard


async def test_messages_pass_in_order_and_acknowledgements_are_recorded() -> None:
    receipts = Receipts(
        receipts=(
            Receipt(rollout_id="1-0", state=ReceiptState.RECEIVED),
            Receipt(rollout_id="1-1", state=ReceiptState.LEASED),
            Receipt(rollout_id="1-2", state=ReceiptState.DROPPED, drop_reason=DropReason.EXPIRED),
            Receipt(rollout_id="2-0", state=ReceiptState.TRAINED),
        )
    )
    messages = [bytes([number]) * 1000 for number in range(50)] + [encode(receipts)]
    async with line() as (wire, url, heard), connect(url, compression=None) as socket:
        for message in messages:
            await socket.send(message)
        assert [await socket.recv() for _ in messages] == messages == heard
        assert wire.acknowledged == {"1-0", "2-0"}


async def test_messages_twice_and_in_another_order_are_whole_and_all_there() -> None:
    messages, answers = [bytes([number]) * 100 for number in range(100)], list[bytes]()
    async with line(seed=3) as (wire, url, heard), connect(url, compression=None) as socket:
        wire.twice, wire.swapped = 0.3, 0.3
        for message in messages:
            await socket.send(message)
        async with asyncio.timeout(10):
            while not set(messages) <= set(answers):
                answers.append(bytes(await socket.recv()))  # type: ignore[arg-type]
    assert set(heard) == set(messages) and len(heard) > len(messages) + 10
    assert list(dict.fromkeys(heard)) != messages


async def test_a_cut_line_is_noticed_at_both_ends() -> None:
    async with line() as (wire, url, _):
        socket = await connect(url, compression=None)
        await socket.send(b"x")
        await socket.recv()
        assert wire.cut() == 2
        with pytest.raises(websockets.ConnectionClosed):
            await socket.recv()


async def test_no_hub_is_no_answer() -> None:
    async with line() as (_, url, _), Wire(1, random.Random(0)).open() as nowhere:
        assert url != nowhere
        reader, writer = await asyncio.open_connection("127.0.0.1", int(nowhere.rpartition(":")[2]))
        writer.write(REQUEST)
        assert await reader.read() == b""
        writer.close()
