"""A node must continue to work while peers flood its port for other nodes with websocket frames."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve

from echo_node.net.mesh_proof import Handshake
from echo_shared.signing.identity import Identity
from echo_shared.wire.messages import MeshPeer
from tests.echo_node.net.mesh_parts import KEY, LOOPBACK, PATIENCE_S, News, Node
from tests.websocket_floods import KINDS, flood, raw

ANSWERED_WITHIN_S: Final = 0.5


@pytest.fixture
def news() -> News:
    return News()


@pytest.fixture
async def node(news: News, tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(news, tmp_path)
    await node.open()
    yield node
    await node.close()


async def longest_turn_s(over: asyncio.Event) -> float:
    """Return the longest turn of the event loop, in which all of the node's work runs."""
    loop, longest = asyncio.get_running_loop(), 0.0
    while not over.is_set():
        began_at = loop.time()
        await asyncio.sleep(0.005)
        longest = max(longest, loop.time() - began_at)
    return longest


async def connection(node: Node) -> ClientConnection:
    return await connect(f"ws://{LOOPBACK}:{node.mesh.port}", proxy=None, compression=None, close_timeout=0.1)


async def floods(ends: list[ClientConnection | ServerConnection], kind: str, *, reads: bool) -> list[bool]:
    taken = [raw(end) for end in ends]
    over = asyncio.Event()
    longest = asyncio.create_task(longest_turn_s(over))
    cut = await asyncio.gather(*(asyncio.to_thread(flood, one, kind, reads=reads, within_s=4.0) for one in taken))
    over.set()
    assert await longest < ANSWERED_WITHIN_S
    for one, end in zip(taken, ends, strict=True):
        one.close()
        end.transport.abort()
    return list(cut)


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("kind", KINDS)
async def test_frames_without_end_hold_no_node_up(node: Node, kind: str, reads: bool) -> None:
    assert all(await floods([await connection(node) for _ in range(4)], kind, reads=reads))


async def test_a_flooding_member_is_not_linked_for_a_while(node: Node, news: News) -> None:
    me = Identity.generate()
    node.mesh.set_peers([MeshPeer(node_id=me.node_id, host=LOOPBACK, port=0, number=0)])
    socket = await connection(node)
    own = Handshake(me=me, run_key=KEY.key, role=b"connects")
    await socket.send(own.hello)
    theirs = await socket.recv(decode=False)
    await socket.send(own.proof(bytes(theirs)))
    await socket.recv(decode=False)
    await news.until(lambda: node.mesh.links == (me.node_id,))
    assert all(await floods([socket], "empty pings", reads=True))
    await news.until(lambda: not node.mesh.links)
    assert node.mesh._barred_for(me.node_id) > 0


async def test_a_peer_that_was_connected_to_may_not_flood_either(node: Node) -> None:
    accepted: asyncio.Queue[ServerConnection] = asyncio.Queue()

    async def accept(socket: ServerConnection) -> None:
        accepted.put_nowait(socket)
        await socket.connection_lost_waiter

    async with asyncio.timeout(PATIENCE_S), serve(accept, LOOPBACK, 0, compression=None) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        other = Identity.generate()
        node.mesh.set_peers([MeshPeer(node_id=other.node_id, host=LOOPBACK, port=port, number=0)])
        assert all(await floods([await accepted.get()], "empty pings", reads=True))
        node.mesh.set_peers([])
