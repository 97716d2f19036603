"""Receives pieces from the hub and from other nodes, writes them to files, and reports them to the hub as `Have`.

Everything runs on the event loop: a piece of 64 KiB takes about 50 us, mostly for its hash. Only the search for pieces
of an earlier process runs in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from echo_node.net.mesh import MeshLinks
from echo_shared.errors import CodecError, LocalProtocolError, StorageError
from echo_shared.process.threads import in_thread
from echo_shared.swarm.base import OnProgress
from echo_shared.swarm.piece_file import PieceFile
from echo_shared.swarm.torrent import piece_hash, read_torrent
from echo_shared.wire import relay_tree
from echo_shared.wire.messages import MAX_BATCHED, MAX_MESH, Have, Piece

log = logging.getLogger(__name__)

MOST_EARLY_BYTES: Final = 8 * 2**20
"""Maximum bytes of pieces that are kept although this node does not expect their artefact yet: its announcement may
still wait in a queue. The oldest are dropped first.
"""
MOST_USELESS_BYTES: Final = 256 * 2**20
"""Useless bytes (duplicates, and pieces of complete artefacts) for which a node loses its link, unless it has sent more
useful ones. Honest nodes send some, because the hub itself sends pieces that slow nodes have not forwarded yet.
"""
MOST_SENDERS: Final = 4 * MAX_MESH
"""Maximum number of nodes whose useful and useless bytes are counted. When one more node sends, the oldest counts are
dropped.
"""
_OVERHEAD_BYTES: Final = 1_024
"""Memory of an early piece that counts in addition to its data, in bytes."""
_SAY_EVERY_S: Final = 0.005
_FORGOTTEN: Final = 64
"""Number of ended artefacts that are remembered, because the hub may still ask this node to forward their pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """Result of receiving one artefact, complete or partial. Byte counts are those of new pieces."""

    complete: bool
    """True: all pieces have arrived. False: the wait ended because no new piece had come for a while."""
    pushed_bytes: int
    """Bytes that the hub itself sent."""
    mesh_bytes: int
    """Bytes that other nodes sent."""
    seconds: float


NOTHING: Final = Received(complete=False, pushed_bytes=0, mesh_bytes=0, seconds=0.0)


@dataclass(slots=True)
class _Sender:
    """Counts of the useful and the useless bytes that one node has sent. A node that sends too many useless ones loses
    its link.
    """

    useful_bytes: int = 0
    useless_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class _Expected:
    file: PieceFile
    began_at: float
    last_at: float
    """Time at which the last new piece arrived."""
    on_progress: OnProgress | None = None
    pushed_bytes: int = 0
    mesh_bytes: int = 0
    error: StorageError | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that is set once the artefact is complete or has failed."""
    unsaid: list[int] = field(default_factory=list)
    """Received pieces that were not reported to the hub yet."""
    handed_on: set[tuple[int, int]] = field(default_factory=set)
    """(piece, node number) of pieces that came from another node and were forwarded."""


class Receiver:
    """Receiver of artefacts in pieces. `take` gets every piece from the hub's connection and from links to other nodes;
    `reports` returns the messages that report received pieces to the hub.
    """

    def __init__(self, mesh: MeshLinks) -> None:
        self._mesh = mesh
        self._expected: dict[bytes, _Expected] = {}
        self._early: deque[tuple[Piece, str | None]] = deque()
        self._early_bytes = 0
        self._forgotten: dict[bytes, _Expected] = {}
        """Artefacts that this node no longer expects, oldest first."""
        self._senders: dict[str, _Sender] = {}
        self._farewells: list[Have] = []
        self._news = asyncio.Event()

    async def reports(self) -> list[Have]:
        """Wait for new pieces, and return the messages that report them to the hub."""
        await self._news.wait()
        await asyncio.sleep(_SAY_EVERY_S)
        self._news.clear()
        return self._unsaid()

    def close(self) -> None:
        for info_hash in tuple(self._expected):
            self.forget(info_hash)

    async def expect(self, torrent: bytes, parent: Path) -> PieceFile:
        """Expect this torrent's pieces below `parent`, and report to the hub the pieces that exist already.

        Raises CodecError and StorageError. Cancel-safe.
        """
        layout = read_torrent(torrent)
        if layout.info_hash in self._expected:
            raise LocalProtocolError(f"{layout.name} is expected already.")
        file = PieceFile(layout, parent)
        await in_thread(file.open)
        now = asyncio.get_running_loop().time()
        expected = _Expected(file=file, began_at=now, last_at=now)
        self._expected[layout.info_hash] = expected
        self._forgotten.pop(layout.info_hash, None)
        self._say_all(expected)
        if file.complete:
            expected.ended.set()
        self._take_early(layout.info_hash)
        return file

    def take(self, piece: Piece, sender: str | None) -> None:
        """Store a piece from the node `sender` (None = the hub), and forward it along its route. Does not wait."""
        expected = self._expected.get(piece.info_hash)
        if not piece.data:
            self._take_over(expected or self._forgotten.get(piece.info_hash), piece, sender)
            return
        if expected is None:
            self._put_aside(piece, sender)
            return
        # Skip the hash of a piece that is already stored, unless other nodes need the piece.
        if sender is not None and expected.file.has(piece.index):
            self._count_useless(sender, piece)
            self._hand_on_again(expected, piece, sender)
            return
        try:
            is_new = expected.file.write(piece.index, piece.data)
        except CodecError as error:
            self._blame(sender, str(error))
            return
        except StorageError as error:
            expected.error = error
            expected.ended.set()
            return
        self._hand_on(expected, piece, sender)
        if is_new:
            self._count(expected, piece, sender)

    def _hand_on(self, expected: _Expected, piece: Piece, sender: str | None) -> None:
        """Forward a verified piece along its route. If the piece came from another node, each further node gets it at
        most once.
        """
        if not piece.hand_on:
            return
        try:
            branches = relay_tree.split(piece.hand_on)
        except CodecError as error:
            self._blame(sender, str(error))
            return
        if sender is not None:
            # Drop repeated numbers: a hostile node may name the same node many times in one route.
            first = {number: below for number, below in reversed(branches) if self._mesh.is_linked_with(number)}
            branches = [one for one in first.items() if (piece.index, one[0]) not in expected.handed_on]
            expected.handed_on.update((piece.index, number) for number, _ in branches)
        self._mesh.hand_on(piece, branches)

    def _hand_on_again(self, expected: _Expected, piece: Piece, sender: str) -> None:
        """Forward a piece that came a second time, because nodes further along its route may need it."""
        if not piece.hand_on:
            return
        if expected.file.layout.piece_hashes[piece.index] == piece_hash(piece.data):
            self._hand_on(expected, piece, sender)
        else:
            self._blame(sender, f"piece {piece.index} does not match its hash")

    def _take_over(self, expected: _Expected | None, piece: Piece, sender: str | None) -> None:
        """Forward a stored piece at the hub's request."""
        if sender is not None:
            self._blame(sender, "a piece without data")
        elif expected is not None and expected.file.has(piece.index):
            try:
                data = expected.file.read(piece.index)
                if piece.info_hash not in self._expected:
                    expected.file.close()
            except StorageError as error:
                log.debug("Piece %d is not forwarded: %s", piece.index, error)
                return
            self._hand_on(expected, piece.model_copy(update={"data": data}), None)

    async def wait(self, info_hash: bytes, *, silence_s: float, on_progress: OnProgress | None = None) -> Received:
        """Wait until the artefact is complete, or until no new piece has come for `silence_s` seconds. Afterwards the
        artefact is no longer expected.

        Raises StorageError. Cancel-safe: received pieces stay.
        """
        expected, loop = self._expected[info_hash], asyncio.get_running_loop()
        expected.on_progress = on_progress
        try:
            while not expected.ended.is_set():
                silent_at = expected.last_at + silence_s
                if silent_at <= loop.time():
                    break
                try:
                    async with asyncio.timeout_at(silent_at):
                        await expected.ended.wait()
                except TimeoutError:
                    continue  # Check again: new pieces may have come in the meantime.
            if expected.error is not None:
                raise expected.error
        finally:
            self.forget(info_hash)
        return Received(
            complete=expected.file.complete,
            pushed_bytes=expected.pushed_bytes,
            mesh_bytes=expected.mesh_bytes,
            seconds=loop.time() - expected.began_at,
        )

    def forget(self, info_hash: bytes) -> None:
        """Stop expecting an artefact, and close its files. If it is incomplete, tell the hub to stop the push."""
        expected = self._expected.pop(info_hash, None)
        if expected is None:
            return
        self._forgotten[info_hash] = expected
        if len(self._forgotten) > _FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]
        self._farewells += _haves(info_hash, expected.unsaid, wanted=expected.file.complete)
        self._news.set()
        expected.file.close()

    def say_all(self) -> None:
        """Report all pieces again, to a hub that may have lost the earlier reports in a reconnect."""
        for expected in self._expected.values():
            self._say_all(expected)

    def _say_all(self, expected: _Expected) -> None:
        missing = expected.file.missing
        expected.unsaid = [piece for piece in range(len(expected.file.layout.piece_hashes)) if piece not in missing]
        self._news.set()

    def _unsaid(self) -> list[Have]:
        messages, self._farewells = self._farewells, []
        for info_hash, expected in self._expected.items():
            if expected.unsaid:
                messages += _haves(info_hash, expected.unsaid, wanted=True)
                expected.unsaid = []
        return messages

    def _count(self, expected: _Expected, piece: Piece, sender: str | None) -> None:
        if sender is None:
            expected.pushed_bytes += len(piece.data)
        else:
            expected.mesh_bytes += len(piece.data)
            self._sender(sender).useful_bytes += _weight(piece)
        expected.last_at = asyncio.get_running_loop().time()
        expected.unsaid.append(piece.index)
        self._news.set()
        if expected.on_progress is not None:
            expected.on_progress(expected.file.done_bytes, expected.file.layout.total_bytes)
        if expected.file.complete:
            expected.ended.set()

    def _put_aside(self, piece: Piece, sender: str | None) -> None:
        """Keep an unexpected piece for a while. Its sender is not at fault, because the hub decides the routes."""
        forgotten = self._forgotten.get(piece.info_hash)
        if forgotten is not None:
            if sender is not None and forgotten.file.has(piece.index):
                self._count_useless(sender, piece)
                self._hand_on_again(forgotten, piece, sender)
            return
        self._early.append((piece, sender))
        self._early_bytes += _weight(piece)
        while self._early_bytes > MOST_EARLY_BYTES:
            self._early_bytes -= _weight(self._early.popleft()[0])

    def _take_early(self, info_hash: bytes) -> None:
        early, self._early, self._early_bytes = self._early, deque(), 0
        for piece, sender in early:
            if piece.info_hash == info_hash:
                self.take(piece, sender)
            else:
                self._early.append((piece, sender))
                self._early_bytes += _weight(piece)

    def _count_useless(self, sender: str, piece: Piece) -> None:
        counts = self._sender(sender)
        counts.useless_bytes += _weight(piece)
        if counts.useless_bytes > max(MOST_USELESS_BYTES, counts.useful_bytes):
            self._blame(sender, f"{counts.useless_bytes} bytes of known pieces")

    def _sender(self, node_id: str) -> _Sender:
        if node_id not in self._senders and len(self._senders) >= MOST_SENDERS:
            del self._senders[next(iter(self._senders))]
        return self._senders.setdefault(node_id, _Sender())

    def _blame(self, sender: str | None, why: str) -> None:
        if sender is None:
            log.warning("The hub has sent an invalid piece: %s", why)
        else:
            self._senders.pop(sender, None)
            self._mesh.drop(sender, why)


def _weight(piece: Piece) -> int:
    return len(piece.data) + _OVERHEAD_BYTES


def _haves(info_hash: bytes, pieces: list[int], *, wanted: bool) -> list[Have]:
    """Return Have messages for these pieces: as few messages as possible, but at least one message if `wanted` is
    False.
    """
    starts = range(0, max(len(pieces), 0 if wanted else 1), MAX_BATCHED)
    return [
        Have(info_hash=info_hash, pieces=tuple(pieces[start : start + MAX_BATCHED]), wanted=wanted) for start in starts
    ]
