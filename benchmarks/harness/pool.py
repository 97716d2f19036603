"""Work in separate processes: many cases in parallel, or one object that answers calls."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any, TypeVar, cast

K = TypeVar("K")
R = TypeVar("R")
T = TypeVar("T")


def pool(most_workers: int, *, workers: int | None = None, tasks_per_child: int | None = None) -> ProcessPoolExecutor:
    """Return a pool of `workers` new processes; by default one for each core, but at most `most_workers`."""
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
    """Call `function` in worker processes, once for each key of `wanted` with the key's arguments. Yield (key, result)
    in the order in which the calls finish.
    """
    if not wanted:
        return
    with pool(len(wanted), workers=workers, tasks_per_child=tasks_per_child) as processes:
        running = {processes.submit(function, *arguments): key for key, arguments in wanted.items()}
        for future in as_completed(running):
            yield running[future], future.result()


_made: Any = None
"""The object that `apart` has made in this process, which is a child of the caller's."""


def _make(make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    global _made
    _made = make(*arguments)


def _call(method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return getattr(_made, method)(*arguments, **named)


@contextmanager
def apart(make: type[T], *arguments: Any) -> Iterator[T]:
    """Make an object in a separate process. Yields a proxy: calls of methods run in that process one at a time, and
    errors come back unchanged.
    """
    with pool(1) as process:
        process.submit(_make, make, arguments).result()
        yield cast(T, _StandIn(process))


class _StandIn:
    def __init__(self, process: ProcessPoolExecutor) -> None:
        self._process = process

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *arguments, **named: self._process.submit(_call, method, arguments, named).result()
