"""Writes beside training: one write at a time, on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Writer:
    """At most one write is under way, so that what waits to be written is never more than one step's."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._under_way: Future[None] | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Carries `write` out on the writer's thread. The one before has ended: `wait` was called."""
        assert self._under_way is None
        self._under_way = self._thread.submit(write)

    def wait(self) -> None:
        """Returns when nothing is under way any more; raises what the last write raised, once."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()
