"""Synchronous access to tasks with `async def` scorers. Many threads may call, and all calls share one event loop.

    task.score                 async def score(self, problem, completion) -> float
    awaited(task, 10.0).score  (problem, completion) -> float, from any thread

Each call has a deadline. After the deadline the call is cancelled and fails. If a scorer blocks the loop, the process
ends, as after a timeout of an ordinary scorer.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, Final

from echo_shared.errors import ScorerError

_METHODS: Final = ("score", "components", "respond")
LOOP_ANSWERS_S: Final = 1.0
"""A free event loop runs a callback within this many seconds. If the loop takes longer, a scorer blocks it."""


def is_async(task: object) -> bool:
    """Return True if at least one of the task's scoring methods is `async def`."""
    return any(inspect.iscoroutinefunction(getattr(task, name, None)) for name in _METHODS)


def awaited(task: object, timeout_s: float) -> Any:
    """Return the task with its `async def` methods wrapped as blocking methods. Each call takes at most `timeout_s`
    seconds."""
    loop = _Loop(timeout_s)
    found = {name: getattr(task, name) for name in dir(task) if not name.startswith("_")}
    waiting = {
        name: loop.waits_for(method)
        for name, method in found.items()
        if name in _METHODS and inspect.iscoroutinefunction(method)
    }
    return SimpleNamespace(**{**found, **waiting})


class _Loop:
    """An event loop in a thread, which the first call starts. So a process that only samples problems never starts the
    thread."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._running: asyncio.AbstractEventLoop | None = None

    def waits_for(self, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        def wait(*arguments: Any) -> Any:
            return self._wait(method(*arguments))

        return wait

    def _loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._running is None:
                self._running = asyncio.new_event_loop()
                threading.Thread(target=self._running.run_forever, name="scorers", daemon=True).start()
            return self._running

    def _wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        loop = self._loop()
        future = asyncio.run_coroutine_threadsafe(call, loop)
        try:
            return future.result(self._timeout_s)
        except TimeoutError as error:
            if future.done():  # The scorer itself raised TimeoutError before the deadline.
                raise
            future.cancel()
            _end_if_held_up(loop)
            raise ScorerError(
                "The scorer took too long.", got=f"more than task.scorer_timeout_s = {self._timeout_s:g}"
            ) from error


def _end_if_held_up(loop: asyncio.AbstractEventLoop) -> None:
    """End this process if a scorer blocks the event loop. It gets the signal that the timer of a synchronous scorer's
    call also sends."""
    answered = threading.Event()
    loop.call_soon_threadsafe(answered.set)
    if not answered.wait(LOOP_ANSWERS_S):
        if sys.platform == "win32":
            os._exit(1)
        os.kill(os.getpid(), signal.SIGALRM)
