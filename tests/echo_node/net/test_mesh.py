"""The mesh (links over which nodes relay pieces) on real sockets: links, traffic, rejected peers, broken links."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from itertools import combinations
from pathlib import Path

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed

from echo_node.net import mesh as mesh_module
from echo_node.net.hole_punching import HolePunching
from echo_node.net.mesh import MeshLinks
from echo_node.net.mesh_proof import Handshake
from echo_shared.errors import SwarmError
from echo_shared.signing.identity import Identity
from echo_shared.wire import relay_tree
from echo_shared.wire.codec import encode
from echo_shared.wire.messages import (
    MAX_PIECE_BYTES,
    LeaseRevoked,
    Meet,
    MeshPeer,
    RunKey,
)
from tests.echo_node.net.mesh_parts import KEY, LOOPBACK, PATIENCE_S, Artefact, News, Node, make_artefact, way
from tests.echo_node.net.punching_parts import PATH, FakeHub, Line, opened

NEW_KEY = RunKey(key_id=2, key=b"n" * 32)


@pytest.fixture
def news() -> News:
    return News()


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_module, "_RETRY_FIRST_S", 0.02)
    monkeypatch.setattr(mesh_module, "_RETRY_LIMIT_S", 0.05)


@pytest.fixture
async def nodes(news: News, tmp_path: Path) -> AsyncIterator[list[Node]]:
    """Yield three listening nodes, sorted by id, which do not know each other yet."""
    nodes = sorted((Node(news, tmp_path) for _ in range(3)), key=lambda node: node.node_id)
    for node in nodes:
        await node.open()
    yield nodes
    for node in nodes:
        await node.close()


@pytest.fixture
def artefact(tmp_path: Path) -> Artefact:
    return make_artefact(tmp_path / "hub")


def introduce(nodes: Sequence[Node]) -> None:
    for node in nodes:
        node.mesh.set_peers([other.peer for other in nodes])


def accept_only(nodes: Sequence[Node], *, but: Sequence[Node] = ()) -> list[MeshPeer]:
    return [node.peer.model_copy(update={"port": 0}) for node in nodes if node not in but]


def name(node: Node, *members: Identity) -> None:
    """Announce these members of the run to the node, as the hub does: they will open connections to the node."""
    node.mesh.set_peers([MeshPeer(node_id=me.node_id, host=LOOPBACK, port=0, number=0) for me in members])


def ids(nodes: Sequence[Node], *, but: Node | None = None) -> tuple[str, ...]:
    return tuple(sorted(node.node_id for node in nodes if node is not but))


def all_linked(nodes: Sequence[Node]) -> bool:
    return all(node.mesh.links == ids(nodes, but=node) for node in nodes)


@contextlib.asynccontextmanager
async def stranger(node: Node) -> AsyncIterator[ClientConnection]:
    async with asyncio.timeout(PATIENCE_S):
        socket = await connect(f"ws://{LOOPBACK}:{node.mesh.port}", proxy=None, compression=None, close_timeout=1)
        try:
            yield socket
        finally:
            socket.transport.abort()
            await socket.wait_closed()


async def prove(socket: ClientConnection, me: Identity, key: RunKey = KEY) -> None:
    own = Handshake(me=me, run_key=key.key, role=b"connects")
    await socket.send(own.hello)
    theirs = await socket.recv()
    assert isinstance(theirs, bytes)
    await socket.send(own.proof(theirs))
    proof = await socket.recv()
    assert isinstance(proof, bytes)
    own.check(theirs, proof)


async def is_cut(socket: ClientConnection) -> None:
    with pytest.raises(ConnectionClosed):
        while True:
            await socket.recv()


async def test_all_link_with_all(nodes: list[Node], news: News) -> None:
    introduce(nodes)
    await news.until(lambda: all_linked(nodes))
    for node in nodes:
        assert node.links[-1] == ids(nodes, but=node)
        assert all(len(after) == len(before) + 1 for before, after in zip(node.links, node.links[1:], strict=False))
    await nodes[0].close()
    await news.until(lambda: all_linked(nodes[1:]))


async def test_one_side_that_can_reach_the_other_is_enough(nodes: list[Node], news: News) -> None:
    """Node 1 cannot reach the other nodes, so the hub tells node 1 that these will connect to it."""
    for node, peers in ((nodes[0], nodes[1:2]), (nodes[2], nodes[::2])):
        node.mesh.set_peers([*(peer.peer for peer in peers), *accept_only(nodes, but=peers)])
    nodes[1].mesh.set_peers(accept_only(nodes))
    await news.until(lambda: nodes[0].mesh.links == ids(nodes[1:]))
    assert not nodes[1].mesh._connectors
    nodes[0].mesh.set_peers(accept_only(nodes[2:]))
    await news.until(lambda: nodes[0].mesh.links == ids(nodes[2:]) and nodes[1].mesh.links == ())


async def test_a_newcomer_is_let_in_once_the_hub_has_named_it(nodes: list[Node], news: News) -> None:
    for newcomer, host in ((nodes[0], nodes[1]), (nodes[1], nodes[2])):
        newcomer.mesh.set_peers([host.peer])
        async with stranger(host) as other:
            with pytest.raises(ConnectionClosed):
                await prove(other, newcomer.me)
        assert host.mesh.links == ()
        host.mesh.set_peers(accept_only([newcomer]))
        await news.until(lambda host=host, newcomer=newcomer: host.mesh.links == (newcomer.node_id,))
        newcomer.mesh.set_peers([])
        await news.until(lambda host=host: not host.mesh.links)


async def test_a_peer_no_longer_named_is_unlinked(nodes: list[Node], news: News) -> None:
    introduce(nodes)
    await news.until(lambda: all_linked(nodes))
    nodes[1].mesh.set_peers([nodes[0].peer])
    await news.until(lambda: nodes[1].mesh.links == ids(nodes[:1]) and nodes[2].mesh.links == ids(nodes[:1]))


async def test_a_member_cannot_link_under_invented_names(nodes: list[Node], news: News) -> None:
    me = Identity.generate()
    name(nodes[0], me)
    async with stranger(nodes[0]) as member:
        await prove(member, me)
        await news.until(lambda: nodes[0].mesh.links == (me.node_id,))
        for _ in range(3):
            async with stranger(nodes[0]) as again:
                with pytest.raises(ConnectionClosed):
                    await prove(again, Identity.generate())
        assert nodes[0].mesh.links == (me.node_id,)


async def test_a_node_that_moved_or_starts_later_is_found(nodes: list[Node], news: News, tmp_path: Path) -> None:
    first, second, _ = nodes
    nowhere = socket.create_server((LOOPBACK, 0))
    port = nowhere.getsockname()[1]
    nowhere.close()
    for host in (LOOPBACK, "x" * 80 + ".invalid", "no such host", ""):
        first.mesh.set_peers([MeshPeer(node_id=second.node_id, host=host, port=port, number=second.number)])
        await asyncio.sleep(0)
    first.mesh.set_peers([second.peer])
    name(second, first.me)
    await news.until(lambda: all_linked(nodes[:2]))
    me = second.me
    await second.close()
    again = Node(news, tmp_path, me=me)
    await again.open()
    name(again, first.me)
    first.mesh.set_peers([again.peer])
    await news.until(lambda: all_linked([first, again]))
    await again.close()


async def test_if_both_sides_connect_one_connection_stays(
    nodes: list[Node], news: News, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Normally the node with the larger id waits before it connects; without this wait both nodes of a pair connect at
    # once.
    monkeypatch.setattr(mesh_module, "backoff_s", lambda *_, **__: 0.0)
    for _ in range(20):
        introduce(nodes)
        await news.until(lambda: all_linked(nodes))
        async with asyncio.timeout(PATIENCE_S):
            while any(one_sided(first, second) for first, second in combinations(nodes, 2)):  # noqa: ASYNC110
                await asyncio.sleep(0)  # Poll, because no callback tells that one link has replaced another.
        for node in nodes:
            node.mesh.set_peers([])
        await news.until(lambda: not any(node.mesh.links for node in nodes))


def one_sided(first: Node, second: Node) -> bool:
    """Return True if the two nodes hold ends of different connections, or only one of them has a connection."""
    ends = first.mesh._links.get(second.node_id), second.mesh._links.get(first.node_id)
    ours, theirs = (None if end is None else end.socket for end in ends)
    return ours is None or theirs is None or ours.local_address != theirs.remote_address


@pytest.mark.parametrize("smaller_again", [True, False])
async def test_a_second_connection_of_the_same_node(nodes: list[Node], news: News, smaller_again: bool) -> None:
    """A second connection opened by the same node replaces the first. If the other node opened the first one, the node
    pings that connection, and keeps it if it works.
    """
    first, second, _ = nodes
    first.mesh.set_peers([second.peer])
    name(second, first.me)
    await news.until(lambda: all_linked(nodes[:2]))
    one, other = (first, second) if smaller_again else (second, first)
    before = other.mesh._links[one.node_id]
    async with stranger(other) as again:
        if smaller_again:
            first.mesh.set_peers([])
            await prove(again, one.me)
            await before.ended.wait()
            assert other.mesh.links == (one.node_id,)
        else:
            with pytest.raises(ConnectionClosed):
                await prove(again, one.me)
            assert other.mesh._links[one.node_id] is before


async def test_a_piece_given_to_one_node_reaches_all(nodes: list[Node], news: News, artefact: Artefact) -> None:
    introduce(nodes)
    await news.until(lambda: all_linked(nodes))
    info_hash = artefact.layout.info_hash
    for node in nodes:
        await node.receiver.expect(artefact.torrent, node.directory)
    waits = [asyncio.create_task(node.receiver.wait(info_hash, silence_s=PATIENCE_S)) for node in nodes]
    for index in range(len(artefact.pieces)):
        first = nodes[index % 3]
        first.receiver.take(artefact.piece(index, to=[node for node in nodes if node is not first]), None)
    async with asyncio.timeout(PATIENCE_S):
        stats = await asyncio.gather(*waits)
    for number, (node, one) in enumerate(zip(nodes, stats, strict=True)):
        assert artefact.matches(node.directory)
        assert one.pushed_bytes == sum(map(len, artefact.pieces[number::3]))
        assert one.mesh_bytes == artefact.layout.total_bytes - one.pushed_bytes
        assert len(node.pieces) == len(artefact.pieces) - len(artefact.pieces[number::3])
        assert not any(piece.hand_on for piece, _ in node.pieces)
    everything = set(range(len(artefact.pieces)))
    await news.until(lambda: all(node.had(info_hash) == everything for node in nodes))


async def test_a_piece_is_relayed_from_node_to_node(nodes: list[Node], news: News, artefact: Artefact) -> None:
    """The first and the third node have no link, so the piece passes through the second."""
    first, second, third = nodes
    second.mesh.set_peers([first.peer, third.peer])
    first.mesh.set_peers([second.peer])
    third.mesh.set_peers([second.peer])
    await news.until(lambda: len(second.mesh.links) == 2)
    for node in nodes:
        await node.receiver.expect(artefact.torrent, node.directory)
    all_way = relay_tree.pack([(second.number, 1, way(third))])
    for index in range(len(artefact.pieces)):
        first.receiver.take(artefact.piece(index).model_copy(update={"hand_on": all_way}), None)
    info_hash = artefact.layout.info_hash
    await news.until(lambda: len(third.had(info_hash)) == len(artefact.pieces))
    assert {sender for _, sender in third.pieces} == {second.node_id}
    assert {piece.hand_on for piece, _ in second.pieces} == {way(third)}
    assert {piece.hand_on for piece, _ in third.pieces} == {b""}
    for node in nodes:
        node.receiver.forget(info_hash)
        assert artefact.matches(node.directory)
    third.pieces.clear()
    told = artefact.piece(3, to=[third]).model_copy(update={"data": b""})
    second.receiver.take(told, None)
    await news.until(lambda: len(third.pieces) == 1)
    assert third.pieces[0][0].data == artefact.pieces[3], "a relay requested by the hub reads the piece from disk"


async def test_a_broken_link_is_made_again(nodes: list[Node], news: News, artefact: Artefact) -> None:
    # Let only one node of each pair connect, because a link that is replaced could lose pieces.
    for number, node in enumerate(nodes):
        later = nodes[number + 1 :]
        node.mesh.set_peers([*(other.peer for other in later), *accept_only(nodes, but=later)])
    await news.until(lambda: all_linked(nodes))
    info_hash, half = artefact.layout.info_hash, len(artefact.pieces) // 2
    for node in nodes:
        await node.receiver.expect(artefact.torrent, node.directory)
    for index in range(half):
        nodes[0].receiver.take(artefact.piece(index, to=nodes[1:]), None)
        if index == half // 2:
            nodes[0].mesh._links[nodes[1].node_id].abort()
    await news.until(lambda: len(nodes[2].had(info_hash)) == half)
    await news.until(lambda: len(nodes[1].links) > 2 and all_linked(nodes))
    assert ids(nodes[2:]) in nodes[1].links[2:], "the hub was not told"
    for index in range(half, len(artefact.pieces)):
        nodes[0].receiver.take(artefact.piece(index, to=nodes[1:]), None)
    await news.until(lambda: set(range(half, len(artefact.pieces))) <= nodes[1].had(info_hash))
    for index in set(range(half)) - nodes[1].had(info_hash):
        nodes[1].receiver.take(artefact.piece(index), None)  # The broken link lost a piece, which the hub sends again.
    for node in nodes:
        await node.receiver.wait(info_hash, silence_s=PATIENCE_S)
        assert artefact.matches(node.directory)


async def test_a_new_key_excludes_nodes_without_it(nodes: list[Node], news: News, artefact: Artefact) -> None:
    introduce(nodes)
    await news.until(lambda: all_linked(nodes))
    old = [node.mesh._links[other.node_id] for node in nodes for other in nodes if other is not node]
    for node in nodes[:2]:
        node.mesh.set_keys([KEY, NEW_KEY])
    await news.until(lambda: all_linked(nodes[:2]) and not nodes[2].mesh.links)
    assert all(link.ended.is_set() for link in old)
    nodes[0].mesh.hand_on(artefact.piece(0), [(node.number, b"") for node in nodes[1:]])
    await news.until(lambda: len(nodes[1].pieces) == 1)
    assert nodes[2].pieces == []
    nodes[2].mesh.set_keys([NEW_KEY])
    await news.until(lambda: all_linked(nodes))
    kept = nodes[0].mesh._links[nodes[1].node_id]
    nodes[0].mesh.set_keys([NEW_KEY])
    assert nodes[0].mesh._links[nodes[1].node_id] is kept and not kept.ended.is_set()


async def test_a_new_key_while_strangers_come_and_go(nodes: list[Node], news: News) -> None:
    introduce(nodes)

    async def come_and_go() -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(LOOPBACK, nodes[0].mesh.port)
                writer.close()
            await asyncio.sleep(0)

    strangers = [asyncio.create_task(come_and_go()) for _ in range(8)]
    for key_id in range(2, 200):
        for node in nodes:
            node.mesh.set_keys([RunKey(key_id=key_id, key=key_id.to_bytes(32))])
        await asyncio.sleep(0)
    for task in strangers:
        task.cancel()
    await asyncio.wait(strangers)
    await news.until(lambda: all_linked(nodes))


async def test_no_peer_is_accepted_before_the_welcome(news: News, tmp_path: Path) -> None:
    node = Node(news, tmp_path)
    await node.open(key=None)
    async with stranger(node) as visitor:
        await is_cut(visitor)
    await node.close()


@pytest.mark.parametrize(
    "hello",
    ["text", b"", b"short", random.Random(0).randbytes(64), bytes(MAX_PIECE_BYTES), bytes(2 * MAX_PIECE_BYTES)],
    ids=["text", "nothing", "short", "random", "large", "too large"],
)
async def test_a_peer_without_a_proof_is_disconnected(nodes: list[Node], hello: str | bytes) -> None:
    async with stranger(nodes[0]) as visitor:
        with contextlib.suppress(ConnectionClosed):
            await visitor.send(hello)
            await visitor.send(secrets.token_bytes(96))
        await is_cut(visitor)
    assert nodes[0].mesh.links == () and nodes[0].links == []


async def test_a_wrong_key_or_itself_is_refused(nodes: list[Node]) -> None:
    for identity, key in ((Identity.generate(), NEW_KEY), (nodes[0].me, KEY)):
        async with stranger(nodes[0]) as visitor:
            with pytest.raises(ConnectionClosed):
                await prove(visitor, identity, key)
    assert nodes[0].links == []


async def test_idle_strangers_keep_no_member_out(
    nodes: list[Node], news: News, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_module, "MOST_HALF_OPEN", 2)
    me = Identity.generate()
    name(nodes[0], me)
    async with stranger(nodes[0]) as oldest, stranger(nodes[0]), stranger(nodes[0]) as member:
        await is_cut(oldest)
        await prove(member, me)
        await news.until(lambda: len(nodes[0].mesh.links) == 1)
        assert len(nodes[0].mesh._half_open) == 1
        monkeypatch.setattr(mesh_module, "HANDSHAKE_S", 0.05)
        async with stranger(nodes[0]) as silent:
            await is_cut(silent)
        assert nodes[0].mesh.links == (me.node_id,)


async def test_idle_strangers_at_one_address_are_few(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_module, "MOST_HALF_OPEN_OF_HOST", 1)
    async with stranger(nodes[0]), stranger(nodes[0]):
        assert len(nodes[0].mesh._half_open) == 2, "on loopback they are not told apart by address"
    monkeypatch.setattr(mesh_module, "is_loopback", lambda host: host != LOOPBACK)
    async with stranger(nodes[0]) as oldest, stranger(nodes[0]):
        await is_cut(oldest)


async def test_connections_without_a_handshake_are_not_logged(
    nodes: list[Node], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for noise in (b"\x1b[31mGET / evil\r\n\r\n", b"\x00" * 100, b"GET / HTTP/1.1\r\nHost: x\r\nX-\x1b: y\r\n\r\n"):
        reader, writer = await asyncio.open_connection(LOOPBACK, nodes[0].mesh.port)
        writer.write(noise)
        writer.write_eof()
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
        writer.close()
    async with stranger(nodes[0]) as visitor:
        await visitor.send("\x1b[31m evil")
        await is_cut(visitor)
    assert "evil" not in caplog.text and "\x1b" not in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_member_that_sends_wrong_bytes_is_dropped_and_not_taken_back(
    nodes: list[Node], news: News, artefact: Artefact
) -> None:
    introduce(nodes)
    await news.until(lambda: all_linked(nodes))
    victim, liar, other = nodes
    for node in nodes:
        await node.receiver.expect(artefact.torrent, node.directory)
    wrong = artefact.piece(0).model_copy(update={"data": artefact.pieces[1]})
    liar.mesh.hand_on(wrong, [(victim.number, b""), (other.number, b"")])
    await news.until(lambda: victim.mesh.links == (other.node_id,) and other.mesh.links == (victim.node_id,))
    other.receiver.take(artefact.piece(2, to=[victim]), None)
    await news.until(lambda: victim.had(artefact.layout.info_hash) == {2})
    for node in (victim, other):
        assert node.node_id not in liar.mesh.links
        async with stranger(node) as again:
            with pytest.raises(ConnectionClosed):
                await prove(again, liar.me)


async def test_a_dropped_node_is_taken_back_later(
    nodes: list[Node], news: News, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_module, "FIRST_BAR_S", 0.05)
    for one, other in ((nodes[0], nodes[1]), (nodes[1], nodes[0])):
        introduce(nodes[:2])
        await news.until(lambda: all_linked(nodes[:2]))
        changes = len(one.links)
        one.mesh.drop(other.node_id, "the test says so")
        await news.until(lambda one=one, changes=changes: len(one.links) >= changes + 2 and all_linked(nodes[:2]))


async def test_a_node_is_barred_for_twice_as_long_each_time(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_module, "LONGEST_BAR_S", 35.0)
    mesh, node_id = nodes[0].mesh, nodes[1].node_id
    for bar_s in (10.0, 20.0, 35.0, 35.0):
        mesh.drop(node_id, "the test says so")
        assert mesh._bars[node_id][1] == bar_s
    mesh._bars[node_id] = asyncio.get_running_loop().time() - 36.0, 35.0
    mesh.drop(node_id, "after a long time of good behaviour")
    assert mesh._bars[node_id][1] == 10.0


@pytest.mark.parametrize("frame", ["text", b"", b"\xc1", encode(LeaseRevoked(lease_id=1, reason="stale")), b"\x80" * 9])
async def test_a_member_that_sends_other_data_is_dropped(nodes: list[Node], news: News, frame: str | bytes) -> None:
    me = Identity.generate()
    name(nodes[0], me)
    async with stranger(nodes[0]) as member:
        await prove(member, me)
        await news.until(lambda: nodes[0].mesh.links == (me.node_id,))
        await member.send(frame)
        await is_cut(member)
    await news.until(lambda: nodes[0].mesh.links == ())
    async with stranger(nodes[0]) as again:
        with pytest.raises(ConnectionClosed):
            await prove(again, me)


async def test_another_node_or_program_at_a_peers_address(nodes: list[Node], news: News) -> None:
    first, second, third = nodes
    asked = asyncio.Event()

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: ws://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n")
        writer.close()
        asked.set()

    name(second, first.me)
    name(third, first.me)
    server = await asyncio.start_server(redirect, LOOPBACK, 0)
    async with asyncio.timeout(PATIENCE_S), serve(lambda peer: peer.close(), LOOPBACK, 0) as closing:
        for port in (server.sockets[0].getsockname()[1], next(iter(closing.sockets)).getsockname()[1]):
            first.mesh.set_peers([MeshPeer(node_id=second.node_id, host=LOOPBACK, port=port, number=second.number)])
            await asked.wait()
        first.mesh.set_peers(
            [MeshPeer(node_id=second.node_id, host=LOOPBACK, port=third.mesh.port, number=second.number), third.peer]
        )
        await news.until(lambda: first.mesh.links == (third.node_id,))
        first.mesh.set_peers([second.peer, third.peer])
        await news.until(lambda: first.mesh.links == ids([second, third]))
    server.close()


async def test_a_taken_port_is_an_error(nodes: list[Node]) -> None:
    mesh = MeshLinks(Identity.generate())
    with pytest.raises(SwarmError, match="cannot listen"):
        await mesh.open(LOOPBACK, nodes[0].mesh.port, nodes[0])
    await mesh.close()


@contextlib.asynccontextmanager
async def behind_routers(news: News, root: Path) -> AsyncIterator[tuple[list[Node], list[Line]]]:
    """Two nodes, sorted by id, that connect only as the hub tells both. The hub knows neither's listening port."""
    async with opened(FakeHub()) as hub:
        nodes = sorted((Node(news, root, punching=HolePunching(LOOPBACK)) for _ in range(2)), key=lambda n: n.node_id)
        lines = [Line(hub, node.node_id) for node in nodes]
        lines[0].peer, lines[1].peer = lines[1], lines[0]
        passing = [asyncio.create_task(pass_meets(*pair)) for pair in zip(nodes, lines, strict=True)]
        for node in nodes:
            await node.open()
        yield nodes, lines
        for task in passing:
            task.cancel()
        for node in nodes:
            await node.close()


async def pass_meets(node: Node, line: Line) -> None:
    while True:
        node.mesh.meet(await line.heard.get())


async def test_nodes_that_accept_nothing_link_through_their_routers(
    news: News, tmp_path: Path, artefact: Artefact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_module, "PUNCH_FIRST_S", 0.0)
    async with behind_routers(news, tmp_path) as (nodes, lines):
        for node, line in zip(nodes, lines, strict=True):
            node.mesh.set_peers(accept_only(nodes))
            node.mesh.use_rendezvous(line, PATH)
        await news.until(lambda: all_linked(nodes))
        assert [node.mesh.punched for node in nodes] == [ids(nodes[1:]), ids(nodes[:1])]
        assert [len(line.said) for line in lines] == [1, 1], "the node with the smaller id has asked"
        assert [node.mesh.num_accepted for node in nodes] == [0, 0]
        for node in nodes:
            await node.receiver.expect(artefact.torrent, node.directory)
        nodes[0].receiver.take(artefact.piece(0, to=nodes[1:]), None)
        await news.until(lambda: nodes[1].had(artefact.layout.info_hash) == {0})
        nodes[1].mesh.set_peers([])
        await news.until(lambda: not nodes[0].mesh.links)
        nodes[1].mesh.set_peers(accept_only(nodes))
        await news.until(lambda: all_linked(nodes))
        assert nodes[0].mesh.punched == ids(nodes[1:])


async def test_a_stranger_cannot_have_itself_met(news: News, tmp_path: Path) -> None:
    async with behind_routers(news, tmp_path) as (nodes, lines):
        for node, line in zip(nodes, lines, strict=True):
            node.mesh.use_rendezvous(line, PATH)
            node.mesh.meet(Meet(node_id="stranger", addresses=((LOOPBACK, 5_000),)))
            node.mesh.meet(Meet(node_id="stranger", addresses=((LOOPBACK, 5_000),), answers=True))
        assert [line.said for line in lines] == [[], []]
        assert not any(node.mesh._punchers for node in nodes)


async def test_a_linked_or_barred_node_cannot_have_itself_met(
    news: News, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[str] = []

    async def answer(meet: Meet) -> AsyncIterator[socket.socket]:
        answered.append(meet.node_id)
        return
        yield

    async with behind_routers(news, tmp_path) as (nodes, lines):
        introduce(nodes)
        await news.until(lambda: all_linked(nodes))
        asking, mesh = nodes[0], nodes[1].mesh
        mesh.use_rendezvous(lines[1], PATH)
        monkeypatch.setattr(mesh._punching, "answer", answer)

        async def ask() -> None:
            mesh.meet(Meet(node_id=asking.node_id, addresses=((LOOPBACK, 5_000),)))
            await asyncio.gather(*mesh._punchers.values())

        await ask()
        mesh.drop(asking.node_id, "a wrong piece")
        await news.until(lambda: not mesh.links)
        await ask()
        assert answered == []
        mesh._bars.clear()
        mesh._stop_connecting([asking.node_id])
        nodes[0].mesh.set_peers([])
        for _ in range(3):
            await ask()
        assert answered == [asking.node_id], "once, then it has to wait"


async def test_an_open_node_is_asked_for_nothing(news: News, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_module, "PUNCH_FIRST_S", 0.2)
    async with behind_routers(news, tmp_path) as (nodes, lines):
        introduce(nodes)
        for node, line in zip(nodes, lines, strict=True):
            node.mesh.use_rendezvous(line, PATH)
        await news.until(lambda: all_linked(nodes))
        await asyncio.sleep(0.3)
        assert [line.said for line in lines] == [[], []]
        assert [node.mesh.punched for node in nodes] == [(), ()]
        assert sum(node.mesh.num_accepted for node in nodes) >= 1


async def test_first_attempts_are_spread_by_the_number_of_peers(
    news: News, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_module, "PUNCH_FIRST_S", 0.0)
    monkeypatch.setattr(mesh_module, "PUNCH_SPREAD_S", 0.1)
    drawn = iter((0.0, 0.5, 1.0))
    monkeypatch.setattr(mesh_module.random, "random", lambda: next(drawn, 0.0))
    loop, begun = asyncio.get_running_loop(), list[float]()

    async def ask(node_id: str) -> None:
        begun.append(loop.time() - began_at)
        news.tell()
        await asyncio.Event().wait()

    async with behind_routers(news, tmp_path) as (nodes, lines):
        node = nodes[0]
        monkeypatch.setattr(node.mesh._punching, "ask", ask)
        peers = [MeshPeer(node_id="z" * 20 + str(number), host="", port=0, number=number) for number in range(3)]
        began_at = loop.time()
        node.mesh.set_peers(peers)
        node.mesh.use_rendezvous(lines[0], PATH)
        await news.until(lambda: len(begun) == 3)
    assert begun[1] >= 0.15 - 0.01 and begun[2] >= 0.3 - 0.01


async def test_after_a_failure_nodes_ask_rarely(news: News, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(mesh_module, "PUNCH_FIRST_S", 0.0)
    monkeypatch.setattr(mesh_module, "backoff_s", lambda attempt, jitter, **limits: waits.append(attempt) or 0.0)
    async with behind_routers(news, tmp_path) as (nodes, lines):
        asked: list[str] = []

        async def fail(node_id: str) -> None:
            asked.append(node_id)
            news.tell()

        monkeypatch.setattr(nodes[0].mesh._punching, "ask", fail)
        nodes[0].mesh.set_peers(accept_only(nodes))
        nodes[0].mesh.use_rendezvous(lines[0], PATH)
        await news.until(lambda: len(asked) == 4)
    assert waits[:3] == [0, 1, 2]
    assert set(asked) == {nodes[1].node_id}
