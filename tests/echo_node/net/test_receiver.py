"""Pieces from hub and peers, written to real files: reports to the hub, silence, a full disk, and junk."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from echo_node.net import receiver as receiver_module
from echo_node.net.receiver import Received
from echo_shared.errors import CodecError, LocalProtocolError, StorageError
from echo_shared.wire import relay_tree
from echo_shared.wire.messages import Have, Piece
from tests.echo_node.net.mesh_parts import PATIENCE_S, Artefact, News, Node, make_artefact, way

PEER, OTHER = "a" * 20, "b" * 20


@pytest.fixture
def news() -> News:
    return News()


@pytest.fixture
async def node(news: News, tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(news, tmp_path)
    await node.open()
    yield node
    await node.close()


@pytest.fixture
def artefact(tmp_path: Path) -> Artefact:
    return make_artefact(tmp_path / "hub")


async def received(node: Node, artefact: Artefact, *, silence_s: float = PATIENCE_S) -> Received:
    async with asyncio.timeout(PATIENCE_S):
        return await node.receiver.wait(artefact.layout.info_hash, silence_s=silence_s)


async def test_from_hub_and_peer_into_the_files(node: Node, artefact: Artefact, news: News) -> None:
    await node.receiver.expect(artefact.torrent, node.directory)
    progress: list[tuple[int, int]] = []
    waiting = asyncio.create_task(
        node.receiver.wait(
            artefact.layout.info_hash,
            silence_s=PATIENCE_S,
            on_progress=lambda done, total: progress.append((done, total)),
        )
    )
    await asyncio.sleep(0)
    for index in range(len(artefact.pieces)):
        node.receiver.take(artefact.piece(index), PEER if index % 4 else None)
        node.receiver.take(artefact.piece(index), OTHER)
    stats = await waiting
    assert stats.complete
    assert artefact.matches(node.directory)
    assert stats.pushed_bytes == sum(len(piece) for piece in artefact.pieces[::4])
    assert stats.pushed_bytes + stats.mesh_bytes == artefact.layout.total_bytes == progress[-1][0]
    assert len(progress) == len(artefact.pieces)
    everything = set(range(len(artefact.pieces)))
    await news.until(lambda: node.had(artefact.layout.info_hash) == everything)
    assert all(isinstance(message, Have) and message.wanted for message in node.said)
    assert len(node.said) < len(artefact.pieces)


async def test_present_pieces_are_reported(node: Node, artefact: Artefact, news: News) -> None:
    await node.receiver.expect(artefact.torrent, node.directory)
    for index in (0, 2, 5):
        node.receiver.take(artefact.piece(index), None)
    node.receiver.forget(artefact.layout.info_hash)
    await news.until(lambda: bool(node.said) and node.said[-1].wanted is False)
    node.said.clear()
    file = await node.receiver.expect(artefact.torrent, node.directory)
    assert len(file.missing) == len(artefact.pieces) - 3
    await news.until(lambda: node.had(artefact.layout.info_hash) == {0, 2, 5})
    node.said.clear()
    node.receiver.say_all()
    await news.until(lambda: node.had(artefact.layout.info_hash) == {0, 2, 5})
    for index in sorted(file.missing):
        node.receiver.take(artefact.piece(index), None)
    assert (await received(node, artefact)).pushed_bytes == artefact.layout.total_bytes - 3 * len(artefact.pieces[0])
    await node.receiver.expect(artefact.torrent, node.directory)
    assert (await received(node, artefact)).pushed_bytes == 0


async def test_silence_ends_the_wait_and_the_hub_is_told(node: Node, artefact: Artefact, news: News) -> None:
    await node.receiver.expect(artefact.torrent, node.directory)
    node.receiver.take(artefact.piece(1), None)
    node.receiver.take(artefact.piece(3), PEER)
    stats = await received(node, artefact, silence_s=0.05)
    size = artefact.layout.piece_bytes
    assert (stats.complete, stats.pushed_bytes, stats.mesh_bytes) == (False, size, size)
    await news.until(lambda: bool(node.said) and node.said[-1].wanted is False)
    assert node.had(artefact.layout.info_hash) == {1, 3}
    node.receiver.take(artefact.piece(2), None)  # The node ignores this piece, because it no longer expects the file.
    again = await node.receiver.expect(artefact.torrent, node.directory)
    assert again.done_bytes == 2 * size


async def test_cancelling_a_wait_ends_the_expectation(node: Node, artefact: Artefact, news: News) -> None:
    await node.receiver.expect(artefact.torrent, node.directory)
    with pytest.raises(LocalProtocolError, match="expected already"):
        await node.receiver.expect(artefact.torrent, node.directory)
    waiting = asyncio.create_task(received(node, artefact))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await news.until(lambda: bool(node.said) and node.said[-1].wanted is False)
    node.receiver.forget(artefact.layout.info_hash)
    await node.receiver.expect(artefact.torrent, node.directory)


async def test_pieces_that_come_before_they_are_expected(
    node: Node, artefact: Artefact, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sum(len(piece) + 1_024 for piece in artefact.pieces)
    monkeypatch.setattr(receiver_module, "MOST_EARLY_BYTES", whole)
    junk = Piece(info_hash=b"j" * 20, index=0, data=bytes(10))
    node.receiver.take(junk, PEER)
    node.receiver.take(junk, None)
    for index in range(len(artefact.pieces)):
        node.receiver.take(artefact.piece(index), PEER if index % 2 else None)
    await node.receiver.expect(artefact.torrent, node.directory)
    stats = await received(node, artefact)
    assert artefact.matches(node.directory)
    assert 0 < stats.pushed_bytes < artefact.layout.total_bytes


async def test_only_the_newest_unexpected_artefact_is_kept(
    node: Node, artefact: Artefact, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(artefact.pieces[0])
    monkeypatch.setattr(receiver_module, "MOST_EARLY_BYTES", 3 * (size + 1_024))
    for index in range(8):
        node.receiver.take(artefact.piece(index), None)
    file = await node.receiver.expect(artefact.torrent, node.directory)
    assert set(range(len(artefact.pieces))) - file.missing == {5, 6, 7}


async def test_a_peer_that_sends_wrong_bytes_is_dropped_and_the_hub_is_not(
    node: Node, artefact: Artefact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dropped: list[str] = []
    monkeypatch.setattr(node.mesh, "drop", lambda node_id, why: dropped.append(node_id))
    file = await node.receiver.expect(artefact.torrent, node.directory)
    wrong = artefact.piece(0).model_copy(update={"data": artefact.pieces[1]})
    node.receiver.take(wrong, None)
    node.receiver.take(artefact.piece(0).model_copy(update={"index": 10_000}), None)
    assert dropped == [] and "The hub has sent an invalid piece" in caplog.text
    node.receiver.take(wrong, PEER)
    assert dropped == [PEER] and file.done_bytes == 0


async def test_a_peer_that_sends_unexpected_pieces_is_not_blamed(
    node: Node, artefact: Artefact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer may know of a file earlier than the node, or for longer, so an unexpected piece proves no bad intent."""
    dropped: list[str] = []
    monkeypatch.setattr(node.mesh, "drop", lambda node_id, why: dropped.append(node_id))
    monkeypatch.setattr(receiver_module, "MOST_USELESS_BYTES", 0)
    junk = Piece(info_hash=b"j" * 20, index=0, data=bytes(30_000))
    for _ in range(10):
        node.receiver.take(junk, PEER)
    await node.receiver.expect(artefact.torrent, node.directory)
    node.receiver.forget(artefact.layout.info_hash)
    for _ in range(10):
        node.receiver.take(artefact.piece(0), PEER)
    assert dropped == []


async def test_a_peer_that_floods_with_present_pieces_is_dropped(
    node: Node, artefact: Artefact, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[str] = []
    monkeypatch.setattr(node.mesh, "drop", lambda node_id, why: dropped.append(node_id))
    weight = artefact.layout.piece_bytes + 1_024
    monkeypatch.setattr(receiver_module, "MOST_USELESS_BYTES", 4 * weight)
    await node.receiver.expect(artefact.torrent, node.directory)
    last = len(artefact.pieces) - 1
    node.receiver.take(artefact.piece(last), None)
    for index in range(last):
        node.receiver.take(artefact.piece(index), PEER)
        # A repeated piece is useless, but the peer has sent as many useful bytes, so it keeps its link.
        node.receiver.take(artefact.piece(index), PEER)
    assert dropped == [] and last > 5
    for _ in range(4):
        # The node already has piece 0: the piece counts as useless, and its hash is not computed.
        node.receiver.take(artefact.piece(0).model_copy(update={"data": artefact.pieces[1]}), OTHER)
    node.receiver.forget(artefact.layout.info_hash)
    assert dropped == []
    for sender in (OTHER, PEER):
        node.receiver.take(artefact.piece(0), sender)
    assert dropped == [OTHER, PEER]


async def test_the_counts_of_few_peers_are_kept(
    node: Node, artefact: Artefact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "MOST_SENDERS", 2)
    await node.receiver.expect(artefact.torrent, node.directory)
    for index, sender in enumerate("abcb"):
        node.receiver.take(artefact.piece(index), sender)
    assert list(node.receiver._senders) == ["b", "c"]


async def test_only_valid_pieces_are_relayed_and_once_for_each_peer(
    node: Node, artefact: Artefact, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[tuple[int, bytes]] = []
    dropped: list[str] = []

    def hand_on(piece: Piece, branches: Iterable[tuple[int, bytes]]) -> None:
        assert piece.data == artefact.pieces[piece.index]
        handed.extend((piece.index, relay_tree.pack([(number, 0, below)])) for number, below in branches)

    def taken(index: int, sender: str | None = None, data: bytes | None = None) -> list[tuple[int, bytes]]:
        piece = artefact.piece(index, to=[node])
        node.receiver.take(piece if data is None else piece.model_copy(update={"data": data}), sender)
        told, handed[:] = list(handed), []
        return told

    monkeypatch.setattr(node.mesh, "hand_on", hand_on)
    monkeypatch.setattr(node.mesh, "is_linked_with", lambda number: number == node.number)
    monkeypatch.setattr(node.mesh, "drop", lambda node_id, why: dropped.append(node_id))
    to_it = way(node)
    assert taken(4) == []
    await node.receiver.expect(artefact.torrent, node.directory)
    assert handed == [(4, to_it)]
    handed.clear()
    assert taken(0) == [(0, to_it)] and taken(0) == [(0, to_it)], "as often as the hub says"
    node.receiver.take(artefact.piece(1), None)
    assert handed == []
    assert taken(2, PEER) == [(2, to_it)] and taken(2, PEER) == [] and taken(2, OTHER) == []
    assert taken(0, PEER) == [(0, to_it)] and taken(0, PEER) == [], "present pieces may be needed further down the tree"
    assert taken(3, None, b"wrong") == [] and taken(1, OTHER, b"wrong") == [] and dropped == [OTHER]
    assert taken(2, None, b"") == [(2, to_it)] and taken(5, None, b"") == [], "a missing piece is not relayed"
    assert taken(2, PEER, b"") == [] and dropped == [OTHER, PEER], "only the hub may request that"
    cut_off = artefact.piece(5).model_copy(update={"hand_on": to_it[:2]})
    node.receiver.take(cut_off, OTHER)
    assert handed == [] and dropped == [OTHER, PEER, OTHER]
    node.receiver.take(artefact.piece(5).model_copy(update={"hand_on": 50 * to_it}), PEER)
    assert handed == [(5, to_it)], "a way that names the node fifty times"
    handed.clear()
    node.receiver.forget(artefact.layout.info_hash)
    assert taken(2, None, b"") == [(2, to_it)], "read from its files"
    assert taken(1, PEER) == [(1, to_it)] and taken(1, PEER) == []
    far_off = artefact.piece(4).model_copy(update={"hand_on": relay_tree.pack([(65_535, 0, b"")])})
    node.receiver.take(far_off, PEER)
    assert handed == [] and node.receiver._forgotten[artefact.layout.info_hash].handed_on <= {
        (index, node.number) for index in range(len(artefact.pieces))
    }


async def test_a_full_disk_fails_the_wait(node: Node, artefact: Artefact, small_disk, news: News) -> None:
    await node.receiver.expect(artefact.torrent, small_disk.directory)
    small_disk.fill(leave_bytes=100_000)
    waiting = asyncio.create_task(received(node, artefact))
    for index in range(len(artefact.pieces)):
        node.receiver.take(artefact.piece(index), None)
    with pytest.raises(StorageError, match="disk is full"):
        await waiting
    await news.until(lambda: bool(node.said) and node.said[-1].wanted is False)
    small_disk.empty()
    file = await node.receiver.expect(artefact.torrent, small_disk.directory)
    assert 0 < file.done_bytes < artefact.layout.total_bytes


async def test_an_invalid_torrent_or_directory_is_refused(node: Node, artefact: Artefact, tmp_path: Path) -> None:
    with pytest.raises(CodecError):
        await node.receiver.expect(b"no torrent", node.directory)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        await node.receiver.expect(artefact.torrent, tmp_path / "file")


async def test_many_pieces_are_reported_in_several_messages(
    node: Node, artefact: Artefact, news: News, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "MAX_BATCHED", 3)
    await node.receiver.expect(artefact.torrent, node.directory)
    for index in range(len(artefact.pieces)):
        node.receiver.take(artefact.piece(index), None)
    node.receiver.forget(artefact.layout.info_hash)
    await news.until(lambda: len(node.had(artefact.layout.info_hash)) == len(artefact.pieces))
    assert [len(message.pieces) for message in node.said] == [3] * (len(artefact.pieces) // 3) + [
        len(artefact.pieces) % 3
    ]
