"""Pushes artefacts to nodes over their websockets, piece by piece, as `core.spread.broadcast` plans it.

What is pushed is read from its files piece by piece. Nothing here waits for a node: what a node does not get, or does
not want from the hub's hand, it fetches from the swarm or the web seed.
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

from echo_hub.core.spread.broadcast import CHECK_S, Broadcast, Send
from echo_hub.core.spread.windows import Paths
from echo_hub.net.artefact_store import Carrier
from echo_hub.net.send_queue import Rank
from echo_shared.messages import FromHub, Have, Links, Piece
from echo_shared.swarm.torrent import Layout

log = logging.getLogger(__name__)

PIECES_KEPT: Final = 64
"""Pieces that are read from disk once for the nodes that get them directly one after the other; at most 16 MiB."""


PUSHED_VERSIONS: Final = 2
"""Versions that are on their way at a time: the newest, and one that may be closer to its end."""


class Sender(Protocol):
    """What pushes need of the gateway."""

    def push(self, node_id: str, make: Callable[[], FromHub | None], rank: Rank) -> bool:
        """Calls `make` when there is room for its message, if any. False when the node is not connected."""


@dataclass(frozen=True, slots=True, eq=False)
class _Push:
    """One artefact on its way."""

    plan: Broadcast
    version: int
    hand_on: bool
    layout: Layout
    piece: Callable[[int], bytes]
    """A piece's data, by its number."""
    forget: Callable[[], None]
    """Frees what is kept of the artefact."""


class Broadcaster:
    """All artefacts that are being pushed; `run` sends until it is cancelled. Belongs to one event loop."""

    def __init__(self, gateway: Sender) -> None:
        self._gateway = gateway
        self._paths = Paths()
        self._pushes: dict[bytes, _Push] = {}
        """By info-hash, in the order in which they began."""
        self._news = asyncio.Event()

    def number_of(self, node_id: str) -> int:
        """What a piece's way calls the node, until it has left."""
        return self._paths[node_id].number

    @property
    def uplink_bytes_s(self) -> float | None:
        """What the hub's uplink carries when there is enough to send; None until that was seen."""
        return self._paths.uplink.steady_rate

    def start(self, carrier: Carrier, node_ids: Iterable[str], *, hand_on: bool) -> None:
        """Pushes `carrier` to these nodes, too, if it is being pushed; what was started last goes first.

        `hand_on`: they hand pieces on to one another. Pushes of versions older than the newest PUSHED_VERSIONS end.
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
        """Stops pushing an artefact that nobody wants any more."""
        if (push := self._pushes.get(info_hash)) is not None:
            push.plan.end(time.monotonic())
        self._news.set()

    def _end_before(self, version: int) -> None:
        older = sorted({push.version for push in self._pushes.values() if push.version < version}, reverse=True)
        for info_hash, push in self._pushes.items():
            if push.version in older[PUSHED_VERSIONS - 1 :]:
                self.end(info_hash)

    def said(self, node_id: str, message: Have | Links) -> None:
        """Takes in what a node has, and whom it is linked with. One that was gone for a while joins what it still
        wants."""
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
        """Takes in that the node's connection is gone."""
        for push in self._pushes.values():
            push.plan.leave(node_id, time.monotonic())
        self._paths.forget(node_id)
        self._news.set()

    async def run(self) -> None:
        """Sends what is planned, after everything that happens and whenever something may be late."""
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
                rank = (-push.version, not send.hand_on)  # The newest, and of that what other nodes wait for.
                if not self._gateway.push(send.node_id, partial(self._piece, push, send), rank):
                    push.plan.leave(send.node_id, time.monotonic())
            if push.plan.done:
                push.forget()  # Its nodes' queues may still know it.
                del self._pushes[info_hash]

    def _piece(self, push: _Push, send: Send) -> Piece | None:
        """The frame of a planned piece; None when it has become useless since it was planned, or cannot be read."""
        left = push.plan.left_of(send)
        if left is None:
            return None
        try:
            data = b"" if left.is_there else push.piece(left.piece)
        except OSError as error:
            log.warning("%s cannot be pushed any more: %s", push.layout.name, error)
            push.plan.end(time.monotonic())
            self._news.set()
            return None
        return Piece(info_hash=push.layout.info_hash, index=left.piece, data=data, hand_on=left.hand_on)


def _read(layout: Layout, directory: Path, piece: int) -> bytes:
    """From the page cache as a rule: what is pushed was just written."""
    data = bytearray()
    for part in layout.slices(piece, piece + 1):
        with (directory / part.path).open("rb") as file:
            file.seek(part.offset)
            data += file.read(part.length)
    if len(data) != layout.size_of_piece(piece):
        raise OSError(f"{directory} is shorter than its torrent says")
    return bytes(data)
