"""Retries of writes to a full disk. A write blocks until there is space.

A hub with a full disk waits, reports the lack of space, and resumes by itself: it never leases, acknowledges or trains
on data that was not written. The hub uses a second `Room` in the same way while its database server cannot be reached.
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
    """Repeats writes that fail for lack of disk space until there is space again. Thread-safe.

    A failed write must leave no partial data. `code` is the code of the StorageErrors to retry. `tell` is called from
    any thread: with the error text when a first writer starts to wait, and with "" when no writer waits any more.
    """

    def __init__(
        self,
        *,
        code: str = DISK_FULL,
        retry_s: float = RETRY_S,
        tell: Callable[[str], object] = lambda said: None,
    ) -> None:
        self._code = code
        self._retry_s = retry_s
        self._tell = tell
        self._given_up = Event()
        self._lock = Lock()
        self._waiting: dict[object, str] = {}
        """Error text of each waiting writer, by an object that stands for the writer."""

    @property
    def lacks(self) -> str:
        """The error text about the lack of space if any writer is waiting, else ""."""
        with self._lock:
            return next(iter(self._waiting.values()), "")

    def elsewhere(self, who: str, said: str) -> None:
        """Record that another process, `who`, waits for space with the error text `said`. `said` = "": it no longer
        waits.
        """
        if said:
            self._begin(who, said)
        else:
            self._done(who)

    def give_up(self) -> None:
        """Stop all retries: waiting writers raise their errors, and so do later writes that fail."""
        self._given_up.set()

    def until(self, write: Callable[[], T]) -> T:
        """Call `write` until it succeeds, and return its result. Blocks the calling thread.

        Errors of another kind are raised at once. After `give_up`, the error of the last attempt is raised.
        """
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
        """Await `write` until it succeeds, and return its result. Unlike `until`, wait between two attempts on the
        event loop, without blocking it.
        """
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
        """Record that the writer `turn` waits after `error`. Raises `error` if no retry can resolve it, that is, if it
        has another code.
        """
        if error.code != self._code:
            raise error
        self._begin(turn, error.got or error.what)

    def _begin(self, turn: object, said: str) -> None:
        with self._lock:
            is_first = not self._waiting
            self._waiting[turn] = said
        if is_first:
            self._tell(said)

    def _done(self, turn: object) -> None:
        with self._lock:
            waited = self._waiting.pop(turn, None) is not None
            is_last = waited and not self._waiting
        if is_last and not self._given_up.is_set():
            self._tell("")
