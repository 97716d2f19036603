from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from echo_hub.net.artefact_store import Carrier
from echo_hub.net.broadcaster import Broadcaster
from echo_hub.net.send_queue import DeferredMessage, Rank
from echo_shared.artefacts.manifest import Manifest, ManifestFile
from echo_shared.swarm import make_torrent, read_torrent
from echo_shared.swarm.torrent import piece_hash
from echo_shared.wire.messages import Have, Links, Piece


class Nodes:
    """Stand-in for the gateway, whose nodes take every piece, relay it at once and report it."""

    def __init__(self) -> None:
        self.connected: set[str] = set()
        self.pieces: dict[tuple[str, bytes], dict[int, bytes]] = {}
        self.sent: list[tuple[str, Piece]] = []
        self.answer = True
        self.full = False
        """True while the gateway accepts no further piece."""
        self.waiting: list[tuple[str, DeferredMessage]] = []
        self.broadcaster: Broadcaster
        self.changed = asyncio.Event()

    def push(self, node_id: str, deferred: DeferredMessage, rank: Rank) -> bool:
        if node_id not in self.connected:
            return False
        if self.full:
            self.waiting.append((node_id, deferred))
            self.changed.set()
        elif (message := deferred.build()) is not None:
            assert isinstance(message, Piece) and rank[1] == (not message.hand_on)
            self._take(node_id, message)
        return True

    def _take(self, node_id: str, message: Piece) -> None:
        self.sent.append((node_id, message))
        takers = [node_id, *(self.connected - {node_id} if message.hand_on else ())]
        for taker in takers:
            self.pieces.setdefault((taker, message.info_hash), {})[message.index] = message.data
            if self.answer:
                have = Have(info_hash=message.info_hash, pieces=(message.index,))
                asyncio.get_running_loop().call_soon(self.broadcaster.said, taker, have)
        self.changed.set()

    async def until_complete(self, carrier: Carrier) -> None:
        async with asyncio.timeout(60):
            while any(len(self.got(node, carrier)) < len(carrier.layout.piece_hashes) for node in self.connected):
                self.changed.clear()
                await self.changed.wait()

    def got(self, node_id: str, carrier: Carrier) -> dict[int, bytes]:
        return self.pieces.get((node_id, carrier.info_hash), {})


@pytest.fixture
async def nodes() -> AsyncIterator[Nodes]:
    nodes = Nodes()
    nodes.connected = {"a", "b", "c"}
    nodes.broadcaster = Broadcaster(nodes)
    for node_id in nodes.connected:
        links = tuple(sorted(nodes.connected - {node_id}))
        nodes.broadcaster.said(node_id, Links(node_ids=links))
    run = asyncio.create_task(nodes.broadcaster.run())
    yield nodes
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run


@pytest.fixture
def carrier(tmp_path: Path) -> Carrier:
    return make_carrier(tmp_path / "v1.k")


def make_carrier(directory: Path, *, version: int = 1, num_bytes: int = 500_000) -> Carrier:
    directory.mkdir()
    (directory / "first").write_bytes(directory.name.encode() * 1_000)
    (directory / "second").write_bytes(bytes(range(250)) * (num_bytes // 250))
    torrent = make_torrent(directory)
    manifest = Manifest(
        kind="policy",
        run_id="run",
        name=f"v{version}",
        policy_version=version,
        carrier="keyframe",
        key_id=0,
        info_hash=torrent.info_hash.hex(),
        files=(ManifestFile(path="x.json", size_bytes=1, sha256="0" * 64),),
    )
    return Carrier(manifest=manifest, directory=directory, layout=read_torrent(torrent.torrent))


@pytest.mark.parametrize("hand_on", [True, False])
async def test_every_node_gets_every_piece_as_it_is_on_disk(nodes: Nodes, carrier: Carrier, hand_on: bool) -> None:
    nodes.broadcaster.start(carrier, "abc", hand_on=hand_on)
    await nodes.until_complete(carrier)
    for node_id in "abc":
        got = nodes.got(node_id, carrier)
        assert [piece_hash(got[piece]) for piece in sorted(got)] == list(carrier.layout.piece_hashes)
    assert any(piece.hand_on for _, piece in nodes.sent) == hand_on
    assert nodes.broadcaster.uplink_bytes_s is None


async def test_a_node_that_comes_later_joins_the_push(nodes: Nodes, carrier: Carrier) -> None:
    nodes.broadcaster.start(carrier, "a", hand_on=True)
    nodes.broadcaster.start(carrier, "bc", hand_on=False)
    await nodes.until_complete(carrier)


async def test_the_newest_goes_first(nodes: Nodes, carrier: Carrier, tmp_path: Path) -> None:
    nodes.answer = False
    newer = make_carrier(tmp_path / "v2.k", num_bytes=5_000_000)
    nodes.broadcaster.start(carrier, "abc", hand_on=False)
    nodes.broadcaster.start(newer, "abc", hand_on=False)
    async with asyncio.timeout(60):
        await nodes.changed.wait()
    assert {piece.info_hash for _, piece in nodes.sent} == {newer.info_hash}


async def test_nodes_that_are_gone_or_turned_away_get_nothing(nodes: Nodes, carrier: Carrier, tmp_path: Path) -> None:
    nodes.connected.remove("c")
    nodes.broadcaster.start(carrier, "abc", hand_on=False)
    nodes.broadcaster.said("b", Have(info_hash=carrier.info_hash, pieces=(), wanted=False))
    nodes.broadcaster.said("b", Have(info_hash=bytes(20), pieces=(1,)))
    nodes.broadcaster.node_left("nobody")
    async with asyncio.timeout(60):
        while len(nodes.got("a", carrier)) < len(carrier.layout.piece_hashes):
            nodes.changed.clear()
            await nodes.changed.wait()
    assert nodes.connected == {"a", "b"}
    assert {node_id for node_id, _ in nodes.sent} == {"a"}


async def test_a_node_that_reconnects_joins_with_what_it_has(nodes: Nodes, carrier: Carrier) -> None:
    nodes.answer = False
    nodes.connected = {"a"}
    nodes.broadcaster.start(carrier, "a", hand_on=True)
    nodes.broadcaster.node_left("a")
    here = tuple(range(1, len(carrier.layout.piece_hashes)))
    nodes.broadcaster.said("a", Have(info_hash=carrier.info_hash, pieces=here))
    async with asyncio.timeout(60):
        await nodes.changed.wait()
    assert [(node_id, piece.index) for node_id, piece in nodes.sent] == [("a", 0)]


async def test_unwanted_artefacts_are_no_longer_pushed(nodes: Nodes, tmp_path: Path) -> None:
    nodes.answer = False
    carriers = [make_carrier(tmp_path / f"v{version}.k", version=version, num_bytes=5_000) for version in range(1, 6)]
    first, second, third, fourth, fifth = carriers
    for carrier in (first, second, third):
        nodes.broadcaster.start(carrier, "a", hand_on=False)
    nodes.broadcaster.end(second.info_hash)
    nodes.broadcaster.end(bytes(20))
    nodes.broadcaster.start(fourth, "a", hand_on=False)
    nodes.broadcaster.start(fifth, "a", hand_on=False)
    nodes.broadcaster.said("a", Have(info_hash=fourth.info_hash, pieces=()))
    async with asyncio.timeout(60):
        while len({piece.info_hash for _, piece in nodes.sent}) < 2:
            nodes.changed.clear()
            await nodes.changed.wait()
    assert {piece.info_hash for _, piece in nodes.sent} == {fourth.info_hash, fifth.info_hash}


async def test_an_artefact_without_files_does_not_affect_others(
    nodes: Nodes, carrier: Carrier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = make_carrier(tmp_path / "v2.k")
    (gone.directory / "second").write_bytes(b"")
    nodes.broadcaster.start(carrier, "abc", hand_on=False)
    nodes.broadcaster.start(gone, "abc", hand_on=False)
    await nodes.until_complete(carrier)
    assert "v2.k cannot be pushed any more" in caplog.text


async def test_a_piece_that_became_useless_while_waiting_is_not_sent(nodes: Nodes, tmp_path: Path) -> None:
    carrier = make_carrier(tmp_path / "v1.k", num_bytes=10_000)
    (piece,) = range(len(carrier.layout.piece_hashes))
    nodes.full = True
    nodes.broadcaster.start(carrier, "abc", hand_on=False)
    async with asyncio.timeout(60):
        while len(nodes.waiting) < 3:
            nodes.changed.clear()
            await nodes.changed.wait()
    waiting = dict(nodes.waiting)
    nodes.broadcaster.said("a", Have(info_hash=carrier.info_hash, pieces=(piece,)))
    nodes.broadcaster.node_left("b")
    assert [piece.build() is None for piece in (waiting["a"], waiting["b"], waiting["c"])] == [True, True, False]
    nodes.broadcaster.end(carrier.info_hash)
    assert waiting["c"].build() is None
