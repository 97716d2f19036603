"""Real nodes relay a hub's broadcast over real links on loopback. Every node gets all pieces, although not every pair
of nodes has a link.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from echo_hub.net.artefact_store import Carrier
from echo_hub.net.broadcaster import Broadcaster
from echo_hub.net.send_queue import DeferredMessage, Rank
from echo_hub.spread.neighbours import Neighbours
from echo_shared.artefacts.manifest import Manifest, ManifestFile
from echo_shared.wire.codec import decode_from_hub, encode
from echo_shared.wire.messages import FromNode, Have, Links, Piece
from tests.echo_node.net.mesh_parts import Artefact, News, Node, make_artefact

NUM_NODES, LINKS_EACH = 14, 4
DEADLINE_S = 60.0


class Relay(Node):
    """A node that reports its received pieces to the hub's broadcaster until it leaves."""

    def __init__(self, fleet: Fleet, root: Path) -> None:
        super().__init__(fleet.news, root)
        self._fleet = fleet

    def say(self, message: FromNode) -> None:
        if self.node_id not in self._fleet.gone:
            if isinstance(message, Have):
                self._fleet.broadcaster.said(self.node_id, message)
            super().say(message)


class Fleet:
    """A hub that calls its nodes directly, and nodes that are connected by real sockets."""

    def __init__(self, root: Path) -> None:
        self.news = News()
        self.broadcaster = Broadcaster(self)
        self.gone: set[str] = set()
        self.nodes = [Relay(self, root) for _ in range(NUM_NODES)]
        self.pushed: list[tuple[str, Piece]] = []
        self._neighbours = Neighbours(degree=LINKS_EACH, draw=random.Random(2).randrange)

    async def open(self) -> None:
        for node in self.nodes:
            node.number = self.broadcaster.number_of(node.node_id)
            await node.open()
            self._neighbours.join(node.node_id, listens=True)
        by_id = {node.node_id: node for node in self.nodes}
        for node in self.nodes:
            node.mesh.set_peers([by_id[other].peer for other in self._neighbours.of(node.node_id)])
        await self.news.until(
            lambda: all(set(node.mesh.links) == self._neighbours.of(node.node_id) for node in self.nodes)
        )
        for node in self.nodes:
            self.broadcaster.said(node.node_id, Links(node_ids=node.mesh.links))

    def push(self, node_id: str, deferred: DeferredMessage, rank: Rank) -> bool:
        node = next(node for node in self.nodes if node.node_id == node_id)
        if node_id in self.gone or (message := deferred.build()) is None:
            return node_id not in self.gone
        piece = decode_from_hub(encode(message))
        assert isinstance(piece, Piece)
        self.pushed.append((node_id, piece))
        asyncio.get_running_loop().call_soon(node.receiver.take, piece, None)
        return True

    async def leaves(self, node: Node) -> None:
        self.gone.add(node.node_id)
        self.broadcaster.node_left(node.node_id)
        await node.close()
        for other in self.nodes:
            if other.node_id not in self.gone:
                self.broadcaster.said(other.node_id, Links(node_ids=tuple(set(other.mesh.links) - self.gone)))


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path)
    await fleet.open()
    run = asyncio.create_task(fleet.broadcaster.run())
    yield fleet
    run.cancel()
    await asyncio.wait({run})
    for node in fleet.nodes:
        if node.node_id not in fleet.gone:
            await node.close()


def carrier_of(artefact: Artefact) -> Carrier:
    manifest = Manifest(
        kind="policy",
        run_id="run",
        name="v1",
        policy_version=1,
        carrier="keyframe",
        key_id=0,
        info_hash=artefact.layout.info_hash.hex(),
        files=(ManifestFile(path="x.json", size_bytes=1, sha256="0" * 64),),
    )
    return Carrier(manifest=manifest, directory=artefact.directory, layout=artefact.layout)


@pytest.mark.parametrize("one_leaves", [False, True])
async def test_every_piece_comes_to_all_over_several_hops(fleet: Fleet, tmp_path: Path, one_leaves: bool) -> None:
    artefact = make_artefact(tmp_path / "hub", size_bytes=1_500_000)
    info_hash, num_pieces = artefact.layout.info_hash, len(artefact.pieces)
    for node in fleet.nodes:
        await node.receiver.expect(artefact.torrent, node.directory)
    fleet.broadcaster.start(carrier_of(artefact), [node.node_id for node in fleet.nodes], hand_on=True)
    stay = list(fleet.nodes)
    if one_leaves:
        await fleet.news.until(lambda: any(piece.hand_on for node in fleet.nodes for piece, _ in node.pieces))
        relay = next(node for node in fleet.nodes if any(piece.hand_on for piece, _ in node.pieces))
        stay.remove(relay)
        await fleet.leaves(relay)
    await fleet.news.until(lambda: all(len(node.had(info_hash)) == num_pieces for node in stay))
    for node in stay:
        node.receiver.forget(info_hash)
        assert artefact.matches(node.directory)
    relayed = [piece for node in fleet.nodes for piece, _ in node.pieces]
    assert any(piece.hand_on for piece in relayed), "at least one node must relay pieces from another relay"
