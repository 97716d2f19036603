"""Nodes with new keys flood a hub with websocket frames of every kind on raw sockets. The hub must still answer others
in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Final

import aiohttp
import pytest
from websockets.exceptions import ConnectionClosed

from echo_hub.net.penalties import Fault
from echo_shared.wire.messages import PolicyPublished, RefusalCode
from tests.echo_hub.net.gateway_parts import DEADLINE_S, OFFER, Hub, MakeHub, hubs, status
from tests.websocket_floods import KINDS, flood, raw

ANSWERED_WITHIN_S: Final = 0.5
KEYS: Final = 4
BIG: Final = PolicyPublished(policy_version=1, offer=OFFER.model_copy(update={"torrent": bytes(4 * 2**20)}))


@pytest.fixture
async def make_hub() -> AsyncIterator[MakeHub]:
    async with hubs() as make:
        yield make


@pytest.fixture
async def hub(make_hub: MakeHub) -> Hub:
    return await make_hub()


async def slowest_answer_s(url: str, until: asyncio.Event) -> float:
    """Return the longest time, until `until` is set, that an honest client waited for an answer."""
    slowest = 0.0
    async with aiohttp.ClientSession(url) as http:
        while not until.is_set():
            began_at = time.monotonic()
            async with http.get("/healthz") as answer:
                assert answer.status in (200, 404)
            slowest = max(slowest, time.monotonic() - began_at)
            await asyncio.sleep(0.01)
    return slowest


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("kind", KINDS)
async def test_endless_frames_delay_no_other_client(hub: Hub, kind: str, reads: bool) -> None:
    honest = await hub.node()
    hostile = [await hub.node() for _ in range(KEYS)]
    ends = [raw(node.socket) for node in hostile]
    over = asyncio.Event()
    slowest = asyncio.create_task(slowest_answer_s(hub.server.url, over))
    cut = await asyncio.gather(*(asyncio.to_thread(flood, end, kind, reads=reads, within_s=5.0) for end in ends))
    over.set()
    assert await slowest < ANSWERED_WITHIN_S and all(cut)
    await honest.say(status(1))
    await hub.book.until(lambda: (honest.me.node_id, status(1)) in hub.book.said)
    for end in ends:
        end.close()


async def test_a_flooding_node_must_wait_before_it_reconnects(hub: Hub) -> None:
    node = await hub.node()
    end = raw(node.socket)
    assert await asyncio.to_thread(flood, end, "empty pings")
    end.close()
    await hub.book.until(lambda: hub.book.left == [node.me.node_id])
    again = hub.connect(node.me)
    assert (await again.turned_away(await again.credentials()))[1].code == RefusalCode.TOO_SOON
    assert hub.gateway.turned_away["frame"] == {Fault.TOO_MANY_FRAMES: 1}


async def test_frames_before_the_handshakes_answer_are_refused(hub: Hub) -> None:
    """Bytes that come before the handshake's answer could make the hub misjudge where the following frames begin."""
    node = hub.connect()
    credentials = await node.credentials()
    head = (
        "GET /node HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nAuthorization: {credentials.header()}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", hub.server.port)
    writer.write(head.encode() + b"\x82\xff" + (2**62).to_bytes(8))
    answer = await reader.readuntil(b"\r\n\r\n")
    assert b" 400 " in answer.splitlines()[0] and hub.book.joined == []
    writer.close()


async def test_only_the_newest_ping_is_answered_after_waiting_messages(hub: Hub) -> None:
    node = hub.connect(max_queue=1, max_size=None, compression=None)
    await node.join()
    await asyncio.wait_for(await node.socket.ping(), DEADLINE_S)
    node.socket.transport.pause_reading()
    for _ in range(4):
        assert hub.gateway.send(node.me.node_id, BIG)
        await asyncio.sleep(0)
    answers = [await node.socket.ping(f"ping {number}") for number in range(100)]
    (connection,) = hub.gateway._connections
    transport = connection._transport
    assert transport is not None
    await node.say(status(1))
    await hub.book.until(lambda: len(hub.book.said) == 1)
    assert connection._ping == b"ping 99"
    async with asyncio.timeout(DEADLINE_S):
        assert connection._answering is not None and transport.get_write_buffer_size() > 0
        node.socket.transport.resume_reading()
        for _ in range(4):
            await node.hear()
        # The library takes a pong to the newest ping as a pong to all earlier ones.
        await asyncio.wait(answers)


async def test_a_node_that_only_pings_is_silent(make_hub: MakeHub) -> None:
    hub = await make_hub(heartbeat_s=0.1)
    node = await hub.node()
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(ConnectionClosed):
            while True:
                await node.socket.ping()
                await asyncio.sleep(0.05)
    await hub.book.until(lambda: hub.book.left == [node.me.node_id])
    assert hub.gateway.faults == {Fault.SILENT: 1}
