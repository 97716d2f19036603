"""Writing in parallel to training: one write at a time, on its own thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class CheckpointWriter:
    """Allows one write at a time, so that at most one step's data waits for the disk."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._under_way: Future[None] | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Run `write` on the writer's thread. Call `wait` for the previous write first."""
        assert self._under_way is None
        self._under_way = self._thread.submit(write)

    def wait(self) -> None:
        """Wait until no write is in progress. Raises the last write's error, once."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()
