"""Nodes, artefacts and messages to the hub, for tests of the mesh (links between nodes) and of the receiver of
pieces.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from echo_node.net.hole_punching import HolePunching
from echo_node.net.mesh import MeshLinks
from echo_node.net.receiver import Receiver
from echo_shared.signing.identity import Identity
from echo_shared.swarm import make_torrent, read_torrent
from echo_shared.swarm.torrent import TorrentLayout
from echo_shared.wire import relay_tree
from echo_shared.wire.messages import FromNode, Have, MeshPeer, Piece, RunKey

PATIENCE_S: Final = 60.0
LOOPBACK: Final = "127.0.0.1"
KEY: Final = RunKey(key_id=1, key=b"k" * 32)


class News:
    """Lets a test wait for a condition that callbacks make true."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def tell(self) -> None:
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


_numbers = itertools.count(1)


class Node:
    """The parts of a node that handle pieces: a mesh and a receiver, connected as in a real node."""

    def __init__(
        self, news: News, root: Path, *, me: Identity | None = None, punching: HolePunching | None = None
    ) -> None:
        self.me = me or Identity.generate()
        self.number = next(_numbers)
        self.directory = root / self.me.node_id
        self.said: list[FromNode] = []
        self.links: list[tuple[str, ...]] = []
        """The ids of the linked nodes, after each change of the links."""
        self.pieces: list[tuple[Piece, str]] = []
        self._news = news
        self.mesh = MeshLinks(self.me, punching=punching)
        self.receiver = Receiver(self.mesh)
        self._task: asyncio.Task[None] | None = None

    @property
    def node_id(self) -> str:
        return self.me.node_id

    @property
    def peer(self) -> MeshPeer:
        return MeshPeer(node_id=self.node_id, host=LOOPBACK, port=self.mesh.port, number=self.number)

    async def open(self, *, key: RunKey | None = KEY) -> None:
        await self.mesh.open(LOOPBACK, 0, self)
        self._task = asyncio.create_task(self._tell())
        if key is not None:
            self.mesh.set_keys([key])

    async def close(self) -> None:
        await self.mesh.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self.receiver.close()

    def had(self, info_hash: bytes) -> set[int]:
        """Return the pieces that the hub believes the node to have."""
        said = [message for message in self.said if isinstance(message, Have) and message.info_hash == info_hash]
        return {piece for message in said for piece in message.pieces}

    async def _tell(self) -> None:
        while True:
            for message in await self.receiver.reports():
                self.say(message)

    def say(self, message: FromNode) -> None:
        """Record a message to the hub, in place of sending it."""
        self.said.append(message)
        self._news.tell()

    def take(self, piece: Piece, sender: str) -> None:
        self.pieces.append((piece, sender))
        self.receiver.take(piece, sender)
        self._news.tell()

    def linked(self, node_ids: tuple[str, ...]) -> None:
        self.links.append(node_ids)
        self._news.tell()


def way(*nodes: Node) -> bytes:
    return relay_tree.pack((node.number, 0, b"") for node in nodes)


@dataclass
class Artefact:
    directory: Path
    torrent: bytes
    layout: TorrentLayout
    pieces: list[bytes]

    def piece(self, index: int, *, to: Iterable[Node] = ()) -> Piece:
        """Return a piece that its receiver relays to the nodes `to`, which do not relay it further."""
        return Piece(info_hash=self.layout.info_hash, index=index, data=self.pieces[index], hand_on=way(*to))

    def matches(self, parent: Path) -> bool:
        found = parent / self.directory.name
        return all((found / path).read_bytes() == (self.directory / path).read_bytes() for path, _ in self.layout.files)


def make_artefact(root: Path, *, seed: int = 1, size_bytes: int = 1_000_000) -> Artefact:
    directory = root / f"run-v{seed:06d}.k"
    directory.mkdir(parents=True)
    (directory / "payload").write_bytes(random.Random(seed).randbytes(size_bytes))
    torrent = make_torrent(directory).torrent
    layout = read_torrent(torrent)
    whole = (directory / "payload").read_bytes()
    pieces = [whole[start : start + layout.piece_bytes] for start in range(0, size_bytes, layout.piece_bytes)]
    return Artefact(directory, torrent, layout, pieces)
