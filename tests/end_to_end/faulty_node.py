"""A node process that can send wrong bytes to its peers, directly and by BitTorrent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.dissemination.node_host import NodeHost, main
from echo_node.net.mesh import MeshLinks
from echo_shared.swarm import FetchStats, read_torrent
from echo_shared.swarm.bittorrent import BitTorrentSwarm
from echo_shared.wire.messages import Piece

_honest_hand_on = MeshLinks.hand_on


class FaultyNode(NodeHost):
    async def turn_hostile(self) -> None:
        for kind, name, method in ((MeshLinks, "hand_on", _hand_on), (BitTorrentSwarm, "fetch", _seed_rubbish)):
            setattr(kind, name, method)

    async def has(self, side: str, version: int) -> bool:
        return version in self._nodes[side]._here


def _hand_on(mesh: MeshLinks, piece: Piece, branches: Iterable[tuple[int, bytes]]) -> None:
    _honest_hand_on(mesh, piece.model_copy(update={"data": bytes(byte ^ 0xFF for byte in piece.data)}), branches)


async def _seed_rubbish(
    swarm: BitTorrentSwarm, torrent: bytes, parent: Path, *, tracker_urls: Iterable[str] = (), **_: Any
) -> FetchStats:
    """Claim to have all pieces of the torrent, and send zeros. This function replaces `fetch`."""
    layout = read_torrent(torrent)
    for path, size in layout.files:
        file = parent / layout.name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(size))
    # libtorrent checks a piece before it sends it, unless hash checks are off.
    assert swarm._session is not None
    swarm._session.apply_settings({"disable_hash_checks": True})
    await swarm.seed(torrent, parent / layout.name, tracker_urls)
    return await asyncio.Future()


if __name__ == "__main__":
    main(FaultyNode)
