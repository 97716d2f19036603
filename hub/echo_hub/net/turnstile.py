"""One after the other, at a bounded rate, and fair to addresses: what is dear to begin waits here for its turn.

Who is known goes first, but every fourth turn is a stranger's while there are any. In each of the two groups addresses
take turns, whatever each has waiting: a thousand keys of one address delay those of another by one turn. When more wait
than there may be, the newest of the address with the most makes room. No more than one turn is given in each turn of
the event loop: where the loop is busy, the rate falls by itself.

    rate 50 a second, 199 keys of one address wait, and one of another address comes: it has the second turn from now,
    or, while known nodes come as well, the eighth: after 0.16 s.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Final, Generic, TypeVar

from echo_shared.errors import RefusedError
from echo_shared.messages import RefusalCode

STRANGERS_TURN: Final = 4
"""Every so manieth turn, if there is one."""

T = TypeVar("T")


class FairQueue(Generic[T]):
    """First come, first served within a place; places take turns."""

    def __init__(self) -> None:
        self._of_place: OrderedDict[str, deque[T]] = OrderedDict()
        """In the order of their turns."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def put(self, place: str, item: T) -> None:
        self._of_place.setdefault(place, deque()).append(item)
        self._length += 1

    def next(self) -> T:
        """Whose turn it is; there must be one."""
        place, waiting = self._of_place.popitem(last=False)
        self._length -= 1
        item = waiting.popleft()
        if waiting:
            self._of_place[place] = waiting
        return item

    def drop(self) -> T:
        """The newest of the place with the most; there must be one."""
        place = max(self._of_place, key=lambda one: len(self._of_place[one]))
        waiting = self._of_place[place]
        self._length -= 1
        item = waiting.pop()
        if not waiting:
            del self._of_place[place]
        return item


class Turnstile:
    """`rate` turns a second, of which none is saved up."""

    def __init__(self, *, rate: float, most_waiting: int) -> None:
        self._gap_s = 1 / rate
        self._most_waiting = most_waiting
        self._known: FairQueue[asyncio.Future[None]] = FairQueue()
        self._strangers: FairQueue[asyncio.Future[None]] = FairQueue()
        self._turns_of_known = 0
        """In a row."""
        self._timer: asyncio.TimerHandle | None = None
        """Set for as long as the next turn is not due."""

    async def turn(self, place: str, *, known: bool = False) -> None:
        """Returns when it is the caller's turn. Raises RefusedError when too many wait."""
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
            if not turn.done():  # Else whoever waited has gone.
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
        """For whoever gets no turn."""
        return RefusedError(
            "Too many nodes connect at once.",
            got=f"{self.num_waiting} wait for their turn",
            do="The node tries again by itself.",
            code=RefusalCode.TOO_SOON,
        )
