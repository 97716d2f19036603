"""Room on a disk: what a full one does not take is tried again until there is some, and all else waits for it.

So a hub whose disk is full stands still, says so, and goes on by itself: nothing is leased, acknowledged or trained on
that was not written. A database server that is away is waited for in the same way, by a `Room` of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from threading import Event, Lock
from typing import Final, TypeVar

from echo_shared.errors import DISK_FULL, StorageError

T = TypeVar("T")

RETRY_S: Final = 1.0


class Room:
    """Safe to use from several threads. What is tried again must have left nothing behind when it failed. `code`: of
    the StorageErrors that are waited for. `full` is called with what the disk (or server) says when somebody begins to
    wait, `over` when nobody waits any more; from any thread."""

    def __init__(
        self,
        *,
        code: str = DISK_FULL,
        retry_s: float = RETRY_S,
        full: Callable[[str], object] = lambda said: None,
        over: Callable[[], object] = lambda: None,
    ) -> None:
        self._code = code
        self._retry_s = retry_s
        self._full = full
        self._over = over
        self._given_up = Event()
        self._lock = Lock()
        self._waiting: dict[object, str] = {}
        """Who waits, and what the disk has said."""

    @property
    def lacks(self) -> str:
        """What the disk says to somebody who waits; empty = nobody does."""
        with self._lock:
            return next(iter(self._waiting.values()), "")

    def elsewhere(self, who: str, said: str) -> None:
        """Another process, `who`, waits for room on the same disk, which says `said`; empty = it no longer waits."""
        if said:
            self._begin(who, said)
        else:
            self._done(who)

    def give_up(self) -> None:
        """Nobody waits any more: what does not fit is raised."""
        self._given_up.set()

    def until(self, write: Callable[[], T]) -> T:
        """What `write` gives once no full disk keeps it from it; blocks. Raises what else it raises, and StorageError
        once it is given up."""
        turn = object()
        try:
            while True:
                try:
                    return write()
                except StorageError as error:
                    self._wait(turn, error)
                    if self._given_up.wait(self._retry_s):
                        raise
        finally:
            self._done(turn)

    async def until_done(self, write: Callable[[], Awaitable[T]]) -> T:
        """The same on the event loop."""
        turn = object()
        try:
            while True:
                try:
                    return await write()
                except StorageError as error:
                    self._wait(turn, error)
                    if self._given_up.is_set():
                        raise
                await asyncio.sleep(self._retry_s)
        finally:
            self._done(turn)

    def _wait(self, turn: object, error: StorageError) -> None:
        """Raises the error if waiting does not cure it."""
        if error.code != self._code:
            raise error
        self._begin(turn, error.got or error.what)

    def _begin(self, turn: object, said: str) -> None:
        with self._lock:
            is_first = not self._waiting
            self._waiting[turn] = said
        if is_first:
            self._full(said)

    def _done(self, turn: object) -> None:
        with self._lock:
            waited = self._waiting.pop(turn, None) is not None
            is_last = waited and not self._waiting
        if is_last and not self._given_up.is_set():
            self._over()
