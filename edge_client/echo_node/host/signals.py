"""Passes Ctrl-C and the service manager's stop request to a handler, which ends the work in good order.

The signals never raise KeyboardInterrupt: that exception can interrupt any instruction, and Python may wrap, print or
ignore it. A command without cleanup leaves SIGINT to the system instead (`__main__`). Other commands run their main
coroutine with `run_until_stopped`; `stop_signals` passes the signals to another handler for a while.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeVar

_T = TypeVar("_T")

if sys.platform == "win32":
    STOPPING: Final = (signal.SIGINT, signal.SIGBREAK)
else:
    STOPPING: Final = (signal.SIGINT, signal.SIGTERM)


class Stoppable(Protocol):
    """Work that a signal ends."""

    def request_stop(self, reason: str) -> None:
        """Begin to end the work. Called in the event loop, at each signal."""


_told: ContextVar[Mapping[int, Stoppable]] = ContextVar("told", default=MappingProxyType({}))
"""The work that each signal (by number) currently asks to stop."""


class _Cancelling:
    """Work that consists of one task: each request to stop cancels the task."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task

    def request_stop(self, reason: str) -> None:
        self._task.cancel()


def run_until_stopped(main: Coroutine[Any, Any, _T]) -> _T:
    """Run `main` like `asyncio.run`. Each Ctrl-C cancels it; the call then raises CancelledError."""

    async def stoppable() -> _T:
        task = asyncio.current_task()
        assert task is not None
        with stop_signals(_Cancelling(task), (signal.SIGINT,)):
            return await main

    return asyncio.run(stoppable())


@contextmanager
def stop_signals(work: Stoppable, numbers: Sequence[int] = STOPPING) -> Iterator[None]:
    """Ask `work` to stop, with "got" and the signal's name, at each signal that arrives inside the `with` block.

    Afterwards the previous handler is active again.
    """
    loop, before = asyncio.get_running_loop(), _told.get()
    token = _told.set({**before, **dict.fromkeys(numbers, work)})
    with ExitStack() as undo:
        undo.callback(_told.reset, token)
        for number in numbers:
            if number in before:
                undo.callback(_tell, loop, number, before[number])
            else:
                undo.callback(_leave, loop, number, signal.getsignal(number))
            _tell(loop, number, work)
        yield


def watch_stdin(work: Stoppable) -> None:
    """Ask `work` to stop when standard input ends.

    A daemon thread reads standard input, because not all platforms can await or cancel such reads.
    """
    loop = asyncio.get_running_loop()

    def wait() -> None:
        # Do not use sys.stdin: its lock, held by this thread, would abort the interpreter at exit.
        while os.read(0, 4_096):
            pass
        with suppress(RuntimeError):  # The event loop may end before standard input does.
            loop.call_soon_threadsafe(work.request_stop, "standard input ended")

    threading.Thread(target=wait, name="stdin", daemon=True).start()


def _tell(loop: asyncio.AbstractEventLoop, number: int, work: Stoppable) -> None:
    reason = f"got {signal.Signals(number).name}"
    if sys.platform == "win32":
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(work.request_stop, reason))
    else:
        loop.add_signal_handler(number, work.request_stop, reason)


def _leave(loop: asyncio.AbstractEventLoop, number: int, before: Any) -> None:
    if sys.platform != "win32":
        loop.remove_signal_handler(number)  # This call restores asyncio's default, not the previous handler.
    signal.signal(number, before)
