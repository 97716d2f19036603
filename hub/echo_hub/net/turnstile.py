"""Admit connection attempts one at a time, at a limited rate, fairly among addresses.

Known nodes go first, but every fourth turn goes to an unknown node if one waits. Within both groups the addresses take
turns, however many requests each of them has waiting: a thousand keys from one address delay another address by one
turn. If the queue is full, the newest request of the address with the most requests is dropped. Each turn of the event
loop admits at most one request, so the rate falls by itself when the loop is busy.

  rate 50/s, 199 keys of one address wait, a request from another address arrives: it gets the second turn from now;
  if known nodes wait as well, the eighth, after 0.16 s.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Final, Generic, TypeVar

from echo_shared.errors import RefusedError
from echo_shared.wire.messages import RefusalCode

STRANGERS_TURN: Final = 4
"""One in this number of turns goes to an unknown node, if one waits."""

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue that serves addresses in rotation and, within an address, in order of arrival."""

    def __init__(self) -> None:
        self._of_place: OrderedDict[str, deque[T]] = OrderedDict()
        """Waiting items per address, in the order of the addresses' turns."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def put(self, place: str, item: T) -> None:
        self._of_place.setdefault(place, deque()).append(item)
        self._length += 1

    def next(self) -> T:
        """Remove and return the next item. The queue must not be empty."""
        place, waiting = self._of_place.popitem(last=False)
        self._length -= 1
        item = waiting.popleft()
        if waiting:
            self._of_place[place] = waiting
        return item

    def drop(self) -> T:
        """Remove and return the newest item of the address with the most items. The queue must not be empty."""
        place = max(self._of_place, key=lambda one: len(self._of_place[one]))
        waiting = self._of_place[place]
        self._length -= 1
        item = waiting.pop()
        if not waiting:
            del self._of_place[place]
        return item


class Turnstile:
    """Admits at most `rate` requests per second. Unused turns are not saved up."""

    def __init__(self, *, rate: float, most_waiting: int) -> None:
        self._gap_s = 1 / rate
        self._most_waiting = most_waiting
        self._known: FairQueue[asyncio.Future[None]] = FairQueue()
        self._strangers: FairQueue[asyncio.Future[None]] = FairQueue()
        self._turns_of_known = 0
        """Number of consecutive turns that were given to known nodes."""
        self._timer: asyncio.TimerHandle | None = None
        """Timer of the next turn; None if the last turn is long enough ago for the next request to go at once."""

    async def turn(self, place: str, *, known: bool = False) -> None:
        """Wait for the caller's turn. Raises RefusedError if too many requests wait and this one is dropped."""
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._timer = loop.call_later(self._gap_s, self._due)
            return
        queue = self._known if known else self._strangers
        turn: asyncio.Future[None] = loop.create_future()
        queue.put(place, turn)
        if len(queue) > self._most_waiting:
            dropped = queue.drop()
            if not dropped.done():
                dropped.set_exception(self.too_many())
        await turn

    @property
    def num_waiting(self) -> int:
        return len(self._known) + len(self._strangers)

    def _due(self) -> None:
        self._timer = None
        while self.num_waiting:
            turn = self._next()
            if not turn.done():  # A done future: the waiting task was cancelled.
                turn.set_result(None)
                self._timer = asyncio.get_running_loop().call_later(self._gap_s, self._due)
                return

    def _next(self) -> asyncio.Future[None]:
        if self._known and (self._turns_of_known < STRANGERS_TURN - 1 or not self._strangers):
            self._turns_of_known += 1
            return self._known.next()
        self._turns_of_known = 0
        return self._strangers.next()

    def too_many(self) -> RefusedError:
        return RefusedError(
            "Too many nodes are connecting at once.",
            got=f"{self.num_waiting} requests are waiting",
            do="The node tries again by itself.",
            code=RefusalCode.TOO_SOON,
        )
