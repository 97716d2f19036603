"""Push artefacts to nodes over their websockets, piece by piece, as planned by `core.spread.broadcast`.

Pieces are read from disk as they are sent. Nothing here waits for a node: a node fetches missing or declined pieces
from the swarm or the web seed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Final, Protocol, assert_never

from echo_hub.net.artefact_store import Carrier
from echo_hub.net.send_queue import DeferredMessage, Rank
from echo_hub.spread.broadcast import CHECK_S, Broadcast, SendPiece
from echo_hub.spread.windows import BroadcastPaths
from echo_shared.swarm.torrent import TorrentLayout
from echo_shared.wire.messages import Have, Links, Piece

log = logging.getLogger(__name__)

PIECES_KEPT: Final = 64
"""Maximum number of pieces of an artefact cached in memory, because several nodes receive the same piece soon after
each other; at most 16 MiB."""


PUSHED_VERSIONS: Final = 2
"""Number of versions pushed at the same time: the newest version and its predecessor, whose last pieces some nodes may
still lack.
"""


class Sender(Protocol):
    """The part of the gateway that the broadcaster uses."""

    def push(self, node_id: str, message: DeferredMessage, rank: Rank) -> bool:
        """Queue a low-priority message. Return False if the node is not connected."""


@dataclass(frozen=True, slots=True, eq=False)
class _Push:
    plan: Broadcast
    version: int
    hand_on: bool
    layout: TorrentLayout
    piece: Callable[[int], bytes]
    forget: Callable[[], None]
    """Function that frees the cached pieces."""


@dataclass(frozen=True, slots=True, eq=False)
class _PlannedPiece:
    """A piece that waits in a node's send queue."""

    push: _Push
    send: SendPiece
    news: asyncio.Event
    """Wakes `Broadcaster.run`. Set if the piece cannot be read, because that ends the push."""

    def build(self) -> Piece | None:
        """Read the piece. Return None if the node no longer needs the piece, or if reading fails."""
        push = self.push
        left = push.plan.left_of(self.send)
        if left is None:
            return None
        try:
            data = b"" if left.is_there else push.piece(left.piece)
        except OSError as error:
            log.warning("%s cannot be pushed any more: %s", push.layout.name, error)
            push.plan.end(time.monotonic())
            self.news.set()
            return None
        return Piece(info_hash=push.layout.info_hash, index=left.piece, data=data, hand_on=left.hand_on)


class Broadcaster:
    """All artefacts that are being pushed. `run` sends until it is cancelled. Belongs to one event loop."""

    def __init__(self, gateway: Sender) -> None:
        self._gateway = gateway
        self._paths = BroadcastPaths()
        self._pushes: dict[bytes, _Push] = {}
        """Running pushes by info-hash, in order of their start."""
        self._news = asyncio.Event()

    def number_of(self, node_id: str) -> int:
        """Return the node's number in the instructions for handing pieces on, valid until the node disconnects."""
        return self._paths[node_id].number

    @property
    def uplink_bytes_s(self) -> float | None:
        """Uplink rate of the hub in bytes per second, measured while sending was limited by the uplink; None before the
        first measurement."""
        return self._paths.uplink.steady_rate

    def start(self, carrier: Carrier, node_ids: Iterable[str], *, hand_on: bool) -> None:
        """Start pushing `carrier` to these nodes, or add the nodes to a running push. The artefact whose push started
        last is sent first.

        `hand_on`: the nodes forward pieces to each other. Also ends the pushes of versions older than the newest
        PUSHED_VERSIONS.
        """
        push = self._pushes.get(carrier.info_hash)
        if push is None:
            layout = carrier.layout
            plan = Broadcast(paths=self._paths, num_pieces=len(layout.piece_hashes), piece_bytes=layout.piece_bytes)
            piece = lru_cache(PIECES_KEPT)(partial(_read, layout, carrier.directory))
            version = carrier.manifest.policy_version or 0
            self._end_before(version)
            push = self._pushes[carrier.info_hash] = _Push(plan, version, hand_on, layout, piece, piece.cache_clear)
        for node_id in node_ids:
            push.plan.join(node_id, hand_on=hand_on, now=time.monotonic())
        self._news.set()

    def end(self, info_hash: bytes) -> None:
        if (push := self._pushes.get(info_hash)) is not None:
            push.plan.end(time.monotonic())
        self._news.set()

    def _end_before(self, version: int) -> None:
        older = sorted({push.version for push in self._pushes.values() if push.version < version}, reverse=True)
        for info_hash, push in self._pushes.items():
            if push.version in older[PUSHED_VERSIONS - 1 :]:
                self.end(info_hash)

    def said(self, node_id: str, message: Have | Links) -> None:
        """Process a node's report of its pieces (Have) or of its peer connections (Links).

        A node that had left a push and reports that it still wants the artefact rejoins the push.
        """
        match message:
            case Links():
                self._paths.set_links(node_id, message.node_ids)
            case Have():
                self._has(node_id, message)
            case _:
                assert_never(message)
        self._news.set()

    def _has(self, node_id: str, message: Have) -> None:
        if (push := self._pushes.get(message.info_hash)) is not None:
            now = time.monotonic()
            if message.wanted and message.pieces:
                push.plan.join(node_id, hand_on=push.hand_on, now=now, have=message.pieces)
            push.plan.have(node_id, message.pieces, now)
            if not message.wanted:
                push.plan.turn_away(node_id, now)

    def node_left(self, node_id: str) -> None:
        for push in self._pushes.values():
            push.plan.leave(node_id, time.monotonic())
        self._paths.forget(node_id)
        self._news.set()

    async def run(self) -> None:
        """Send planned pieces after every event, and at least every CHECK_S seconds to detect late pieces."""
        while True:
            self._news.clear()
            self._send_what_is_planned()
            try:
                async with asyncio.timeout(CHECK_S if self._pushes else None):
                    await self._news.wait()
            except TimeoutError:
                continue

    def _send_what_is_planned(self) -> None:
        for push in self._pushes.values():
            push.plan.check(time.monotonic())
        for info_hash, push in reversed(list(self._pushes.items())):
            for send in push.plan.plan(time.monotonic()):
                # Send the newest version first and, within a version, first the pieces that nodes hand on to others.
                rank = (-push.version, not send.hand_on)
                if not self._gateway.push(send.node_id, _PlannedPiece(push, send, self._news), rank):
                    push.plan.leave(send.node_id, time.monotonic())
            if push.plan.done:
                push.forget()  # Free the cached pieces: send queues may keep this object alive.
                del self._pushes[info_hash]


def _read(layout: TorrentLayout, directory: Path, piece: int) -> bytes:
    """Read one piece. It usually comes from the page cache, because pushed files were just written."""
    data = bytearray()
    for part in layout.slices(piece, piece + 1):
        with (directory / part.path).open("rb") as file:
            file.seek(part.offset)
            data += file.read(part.length)
    if len(data) != layout.size_of_piece(piece):
        raise OSError(f"{directory} is shorter than its torrent says")
    return bytes(data)
