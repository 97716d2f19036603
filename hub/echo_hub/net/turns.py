"""Give the hub's own events priority over node connections in the event loop.

When a thousand nodes send at the same time, asyncio would read all their connections in one turn of the loop before
anything else. Verdicts, finished commits and answers of the learner would wait behind these reads. This selector
reports at most `AT_ONCE` node connections per turn, in rotation. The others stay readable and are reported in later
turns.
"""

from __future__ import annotations

import asyncio
import selectors
import sys
from bisect import bisect_right
from collections.abc import Callable
from typing import Final
from weakref import WeakKeyDictionary

AT_ONCE: Final = 64

_Ready = tuple[selectors.SelectorKey, int]


class FairSelector(selectors.DefaultSelector):
    """The selector of one event loop. It limits how many node connections are reported as ready per turn of the
    loop."""

    def __init__(self) -> None:
        super().__init__()
        self.guests: set[int] = set()
        """File descriptors of node connections; only their events are limited."""
        self._last = -1
        """Highest descriptor of a node reported in the last turn; the next turn starts with the descriptors above
        it."""

    def select(self, timeout: float | None = None) -> list[_Ready]:
        """Return the ready events: every event of the hub's own files and sockets, and at most `AT_ONCE` events of
        nodes."""
        ready = super().select(timeout)
        if len(ready) <= AT_ONCE:
            return ready
        own = [one for one in ready if one[0].fd not in self.guests]
        guests = sorted((one for one in ready if one[0].fd in self.guests), key=_descriptor)
        first = bisect_right(guests, self._last, key=_descriptor)
        chosen = (guests[first:] + guests[:first])[:AT_ONCE]
        if chosen:
            self._last = _descriptor(chosen[-1])
        return own + chosen


def _descriptor(ready: _Ready) -> int:
    return ready[0].fd


_OF_LOOP: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, FairSelector]] = WeakKeyDictionary()


def _new_loop() -> asyncio.AbstractEventLoop:
    turns = FairSelector()
    loop = asyncio.SelectorEventLoop(turns)
    _OF_LOOP[loop] = turns
    return loop


loop_factory: Final[Callable[[], asyncio.AbstractEventLoop] | None] = None if sys.platform == "win32" else _new_loop
"""Loop factory for asyncio.Runner; None on Windows, whose loop has no selector."""


def came(transport: asyncio.BaseTransport) -> None:
    """Mark this transport as a node connection."""
    _guests().add(_descriptor_of(transport))


def left(transport: asyncio.BaseTransport) -> None:
    """Unmark this transport. Call before its descriptor is closed: the system reuses the number."""
    _guests().discard(_descriptor_of(transport))


def _guests() -> set[int]:
    turns = _OF_LOOP.get(asyncio.get_running_loop())
    return set() if turns is None else turns.guests


def _descriptor_of(transport: asyncio.BaseTransport) -> int:
    socket = transport.get_extra_info("socket")
    return -1 if socket is None else int(socket.fileno())
