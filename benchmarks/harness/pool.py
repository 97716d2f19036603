"""Pure functions in processes of their own: many cases next to each other, or one object that answers calls."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from types import TracebackType
from typing import Any, Self, TypeVar

K = TypeVar("K")
R = TypeVar("R")


def pool(most_workers: int, *, workers: int | None = None, tasks_per_child: int | None = None) -> ProcessPoolExecutor:
    """Fresh processes, `workers` or one for each core, but at most `most_workers`."""
    count = max(1, min(most_workers, workers or os.cpu_count() or 1))
    return ProcessPoolExecutor(
        count, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=tasks_per_child
    )


def each(
    function: Callable[..., R],
    wanted: Mapping[K, tuple[Any, ...]],
    *,
    workers: int | None = None,
    tasks_per_child: int | None = None,
) -> Iterator[tuple[K, R]]:
    """Call `function` with the arguments of each key; yield the results in the order in which they come."""
    if not wanted:
        return
    with pool(len(wanted), workers=workers, tasks_per_child=tasks_per_child) as processes:
        running = {processes.submit(function, *arguments): key for key, arguments in wanted.items()}
        for future in as_completed(running):
            yield running[future], future.result()


_made: Any = None
"""The object of a child process, see `Remote`."""


def _make(make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    global _made
    _made = make(*arguments)


def _call(method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return getattr(_made, method)(*arguments, **named)


class Remote:
    """An object that lives in a process of its own. Calls run there one at a time; errors come back as they are."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._pool = pool(1)
        self._pool.submit(_make, make, arguments).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown()

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the object in its process; return its result or raise its error."""
        return self._pool.submit(_call, method, arguments, named).result()
