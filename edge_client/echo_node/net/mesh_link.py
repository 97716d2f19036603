"""A link (a proven connection to another node), and the order and rate of sending on all links."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Final, Protocol

from websockets.asyncio.connection import Connection
from websockets.exceptions import ConnectionClosed

from echo_node.core.own_line import LOOK_S, OwnLine
from echo_node.net.flow import Flow
from echo_shared.wire.congestion import CAN_LOOK, LossWatch, pace, sent_by
from echo_shared.wire.messages import Piece
from echo_shared.wire.rate_cap import RateCap
from echo_shared.wire.sent import Sent
from echo_shared.wire.sockets import keep_unsent_short

log = logging.getLogger(__name__)

MOST_QUEUED_BYTES: Final = 4 * 2**20
"""Maximum bytes that wait on one link. Further pieces are dropped, and the hub sends them itself. The hub also bounds
the data in transit.
"""
UNSENT_BYTES: Final = 64 * 1024
"""Maximum unsent bytes of one link in the system's buffer, where the order of frames can no longer change."""


SENDING_AT_ONCE: Final = 4
"""Number of links that send at the same time. One link at a time cannot fill a line with a long round trip; with many
at a time, each piece takes longer.
"""
TURN_S: Final = 0.15
"""Maximum length of a link's turn to send, in seconds. After it the next link may send, even if a slow frame is
unfinished.
"""


Rank = tuple[int, int]
"""Order of a frame as (class, queueing number): frames of the lowest class are sent first, and within a class those
queued first.
"""
_queued = count()


class MeshListener(Protocol):
    """Receiver of pieces from other nodes, and of changes of the links to these nodes."""

    def take(self, piece: Piece, sender: str) -> None:
        """Handle a piece that the node `sender` has sent."""

    def linked(self, node_ids: tuple[str, ...]) -> None:
        """Note the ids of all linked nodes. Called after each change."""


class SendCap:
    """Limit on the rate at which all links together send, with a count of the bytes.

    At most SENDING_AT_ONCE links send at the same time; the next turn goes to the frame with the lowest `Rank` over all
    links. `bytes_per_s` 0 = only the measured rate of the node's own line is a limit (`core.own_line`).
    """

    def __init__(self, bytes_per_s: int, flow: Flow | None = None) -> None:
        self._most_bytes_per_s = bytes_per_s
        self._cap = RateCap(bytes_per_s)
        self._line = OwnLine()
        self._look_at = 0.0
        self.links: set[Link] = set()
        self._flow = flow or Flow()
        self._free = SENDING_AT_ONCE
        self._waiting: list[tuple[Rank, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def turn(self, rank: Rank) -> AsyncIterator[None]:
        """Wait for a turn to send. The turn ends with the `with` block, or after TURN_S seconds. Cancel-safe."""
        await self._take_turn(rank)
        loop = asyncio.get_running_loop()
        ends = loop.call_later(TURN_S, self._give_back)
        try:
            yield
        finally:
            if loop.time() < ends.when():
                ends.cancel()
                self._give_back()

    async def _take_turn(self, rank: Rank) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (rank, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back()
            raise

    def _give_back(self) -> None:
        while self._waiting:
            turn = heappop(self._waiting)[1]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    @property
    def bytes_per_s(self) -> int:
        """Current limit in bytes per second; 0 = none."""
        return self._cap.bytes_per_s

    def look(self) -> None:
        """Measure the rate of this node's internet line every LOOK_S seconds, and lower the limit to that rate. Raises
        nothing.
        """
        now = asyncio.get_running_loop().time()
        if now < self._look_at:
            return
        self._look_at, rate = now + LOOK_S, self._line.rate
        self._line.saw({link: sent for link in self.links if (sent := link.look()) is not None}, now)
        if self._line.rate is not None and self._line.rate != rate:
            learnt = round(self._line.rate)
            self._cap.bytes_per_s = min(learnt, self._most_bytes_per_s or learnt)
            for link in self.links:
                link.pace(learnt)

    async def take(self, count_bytes: int) -> None:
        """Wait until this many bytes may be sent. Calls are served in their order."""
        delay_s = self._cap.delay_s(count_bytes, asyncio.get_running_loop().time())
        if delay_s:
            await asyncio.sleep(delay_s)
        self._flow.sent(count_bytes)


@dataclass(eq=False, slots=True, kw_only=True)
class Link:
    """A connection to a proven node.

    `write` sends the frames that `put` has queued. The code that reads `socket` ends the link.
    """

    node_id: str
    socket: Connection
    opened_here: bool
    is_punched: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _queue: list[tuple[Rank, bytes]] = field(default_factory=list)
    _queued_bytes: int = 0
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, frame: bytes, rank: int = 0) -> bool:
        """Queue a frame for sending on this link. Frames with a lower rank are sent first. Return False if the queue is
        full.
        """
        if self._queued_bytes + len(frame) > MOST_QUEUED_BYTES:
            return False
        heappush(self._queue, ((rank, next(_queued)), frame))
        self._queued_bytes += len(frame)
        self._more.set()
        return True

    async def write(self, uplink: SendCap) -> None:
        """Send queued frames until the connection is closed.

        A peer that reads nothing answers no ping, which closes the connection.
        """
        try:
            keep_unsent_short(self.socket.transport, UNSENT_BYTES)
            watch = LossWatch(self.socket.transport)
            uplink.links.add(self)
            while await self._more.wait():
                while self._queue:
                    async with uplink.turn(self._queue[0][0]):
                        frame = heappop(self._queue)[1]
                        await uplink.take(len(frame))
                        await self.socket.send(frame)
                    watch.sent(len(frame))
                    uplink.look()
                    self._queued_bytes -= len(frame)
                self._more.clear()
        except ConnectionClosed:
            return  # The code that reads the connection gets the same error, and handles it.
        except Exception:
            log.exception("Sending to the node %s failed.", self.node_id)
            self.abort()
        finally:
            uplink.links.discard(self)

    def look(self) -> Sent | None:
        """Return the connection's counters of sent data; None if the system has none, or the link has ended."""
        with contextlib.suppress(OSError):
            return sent_by(self.socket.transport.get_extra_info("socket")) if CAN_LOOK else None
        return None

    def pace(self, bytes_per_s: int) -> None:
        """Limit the connection's packet rate. No effect on a link that has ended."""
        with contextlib.suppress(OSError):
            pace(self.socket.transport.get_extra_info("socket"), bytes_per_s)

    def abort(self) -> None:
        self.socket.transport.abort()
