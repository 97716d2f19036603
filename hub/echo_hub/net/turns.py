"""Turns at the event loop: what is the hub's own goes before what comes from outside, which is taken some at a time.

Of a thousand nodes that all send at once, asyncio would read everything before it does anything else, and do so again
and again: a verdict, a commit that is done, the learner's answer each wait for all of them. Here the loop is told of
`AT_ONCE` connections from outside, in turns; the system tells of the others again.
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


class Turns(selectors.DefaultSelector):
    """Of one event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.guests: set[int] = set()
        """The descriptors of connections from outside."""
        self._last = -1
        """Of the guests that were told of last, the last."""

    def select(self, timeout: float | None = None) -> list[_Ready]:
        """As that of any selector."""
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


_OF_LOOP: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, Turns]] = WeakKeyDictionary()


def _new_loop() -> asyncio.AbstractEventLoop:
    turns = Turns()
    loop = asyncio.SelectorEventLoop(turns)
    _OF_LOOP[loop] = turns
    return loop


loop_factory: Final[Callable[[], asyncio.AbstractEventLoop] | None] = None if sys.platform == "win32" else _new_loop
"""For asyncio.Runner; None: the system's loop has no selector."""


def came(transport: asyncio.BaseTransport) -> None:
    """It is a connection from outside."""
    _guests().add(_descriptor_of(transport))


def left(transport: asyncio.BaseTransport) -> None:
    """It ends; before its descriptor is another's."""
    _guests().discard(_descriptor_of(transport))


def _guests() -> set[int]:
    turns = _OF_LOOP.get(asyncio.get_running_loop())
    return set() if turns is None else turns.guests


def _descriptor_of(transport: asyncio.BaseTransport) -> int:
    socket = transport.get_extra_info("socket")
    return -1 if socket is None else int(socket.fileno())
