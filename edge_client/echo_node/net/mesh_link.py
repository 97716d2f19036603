"""One proven connection to another node, and in which order and how fast this node sends to all of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Final

from websockets.asyncio.connection import Connection
from websockets.exceptions import ConnectionClosed

from echo_node.core.own_line import LOOK_S, OwnLine
from echo_shared.congestion import CAN_LOOK, LossWatch, pace, sent_by
from echo_shared.rate_cap import RateCap
from echo_shared.sent import Sent
from echo_shared.sockets import keep_unsent_short

log = logging.getLogger(__name__)

MOST_QUEUED_BYTES: Final = 4 * 2**20
"""For one link. The hub bounds what is under way; what does not fit all the same is not sent, and the hub sends it."""
UNSENT_BYTES: Final = 64 * 1024
"""That the system has taken for one link."""


SENDING_AT_ONCE: Final = 4
"""Links: one alone does not fill a line with a delay, and with many all that waits for a piece waits for longer."""
TURN_S: Final = 0.15
"""A link that takes its frame more slowly no longer keeps others from sending."""


Rank = tuple[int, int]
"""The lowest goes first; the second number is that of the frame, in the order in which frames were queued."""
_queued = count()


class Uplink:
    """Caps what is sent over all links, in bytes a second, and counts it; 0 = no cap but what the node's own line was
    seen to carry (`core.own_line`). Few links send at once, the lowest rank first, and of the same rank what was queued
    first on any link."""

    def __init__(self, bytes_per_s: int, counted: Callable[[int], None] = lambda count_bytes: None) -> None:
        self._most_bytes_per_s = bytes_per_s
        self._cap = RateCap(bytes_per_s)
        self._line = OwnLine()
        self._look_at = 0.0
        self.links: set[Link] = set()
        """Those that send."""
        self._counted = counted
        self._free = SENDING_AT_ONCE
        self._waiting: list[tuple[Rank, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def turn(self, rank: Rank) -> AsyncIterator[None]:
        """Waits for a turn to send, which lasts as long as the context, but no longer than TURN_S. Cancel-safe."""
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
        """What may be sent; 0 = no cap."""
        return self._cap.bytes_per_s

    def look(self) -> None:
        """Learns every now and then how fast the node's own line is, and has no more sent than that. Raises nothing."""
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
        """Waits until so many bytes may go; first come, first served."""
        delay_s = self._cap.delay_s(count_bytes, asyncio.get_running_loop().time())
        if delay_s:
            await asyncio.sleep(delay_s)
        self._counted(count_bytes)


@dataclass(eq=False, slots=True, kw_only=True)
class Link:
    """A connection to a node that has proven who it is.

    `write` sends what `put` has queued. Whoever reads `socket` ends the link.
    """

    node_id: str
    socket: Connection
    opened_here: bool
    """This node has connected to the other; else the other way round."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _queue: list[tuple[Rank, bytes]] = field(default_factory=list)
    _queued_bytes: int = 0
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, frame: bytes, rank: int = 0) -> bool:
        """Queues a frame, before those of a higher rank; False when the queue is full."""
        if self._queued_bytes + len(frame) > MOST_QUEUED_BYTES:
            return False
        heappush(self._queue, ((rank, next(_queued)), frame))
        self._queued_bytes += len(frame)
        self._more.set()
        return True

    async def write(self, uplink: Uplink) -> None:
        """Sends what is queued until the connection is closed.

        A peer that takes nothing answers no ping either, and that closes it.
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
            return  # The reader hears of it too.
        except Exception:
            log.exception("Nothing more can be sent to the node %s.", self.node_id)
            self.abort()
        finally:
            uplink.links.discard(self)

    def look(self) -> Sent | None:
        """What it has sent; None where the system does not count it, or it has ended."""
        with contextlib.suppress(OSError):
            return sent_by(self.socket.transport.get_extra_info("socket")) if CAN_LOOK else None
        return None

    def pace(self, bytes_per_s: int) -> None:
        """Sends no faster, packet by packet, unless it has ended."""
        with contextlib.suppress(OSError):
            pace(self.socket.transport.get_extra_info("socket"), bytes_per_s)

    def abort(self) -> None:
        self.socket.transport.abort()
