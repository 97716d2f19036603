"""Ctrl-C, and the service manager's request to stop: told to whoever can end in good order, never raised.

A KeyboardInterrupt may come between any two instructions: Python wraps it into other errors, or prints it and goes on.
So a command that has nothing to put in order leaves SIGINT to the system (`__main__`), and one that has runs its main
coroutine by `run_until_stopped`, within which `stop_signals` may hand the signals on to somebody else for a while.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final, TypeVar

Stop = Callable[[str], object]
_T = TypeVar("_T")

if sys.platform == "win32":
    STOPPING: Final = (signal.SIGINT, signal.SIGBREAK)
else:
    STOPPING: Final = (signal.SIGINT, signal.SIGTERM)

_told: ContextVar[Mapping[int, Stop]] = ContextVar("told", default=MappingProxyType({}))
"""Who is told of which signal."""


def run_until_stopped(main: Coroutine[Any, Any, _T]) -> _T:
    """Runs `main` as `asyncio.run` does. Each Ctrl-C cancels it where it waits; CancelledError then comes from here."""

    async def stoppable() -> _T:
        task = asyncio.current_task()
        assert task is not None
        with stop_signals(lambda _: task.cancel(), (signal.SIGINT,)):
            return await main

    return asyncio.run(stoppable())


@contextmanager
def stop_signals(stop: Stop, numbers: Sequence[int] = STOPPING) -> Iterator[None]:
    """Calls `stop` in the running loop, with the signal's name, each time that one comes.

    Afterwards whoever was told before is told again, or what the process did on the signal holds again.
    """
    loop, before = asyncio.get_running_loop(), _told.get()
    token = _told.set({**before, **dict.fromkeys(numbers, stop)})
    with ExitStack() as undo:
        undo.callback(_told.reset, token)
        for number in numbers:
            if number in before:
                undo.callback(_tell, loop, number, before[number])
            else:
                undo.callback(_leave, loop, number, signal.getsignal(number))
            _tell(loop, number, stop)
        yield


def watch_stdin(stop: Stop) -> None:
    """Calls `stop` in the running loop, with the reason, when standard input ends.

    By a daemon thread, because a read of standard input can be neither awaited nor cancelled everywhere.
    """
    loop = asyncio.get_running_loop()

    def wait() -> None:
        # Not through sys.stdin: its lock, held by this thread, would abort the interpreter at its end.
        while os.read(0, 4_096):
            pass
        with suppress(RuntimeError):  # The loop has ended before its standard input did.
            loop.call_soon_threadsafe(stop, "standard input ended")

    threading.Thread(target=wait, name="stdin", daemon=True).start()


def _tell(loop: asyncio.AbstractEventLoop, number: int, stop: Stop) -> None:
    name = signal.Signals(number).name
    if sys.platform == "win32":
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop, name))
    else:
        loop.add_signal_handler(number, stop, name)


def _leave(loop: asyncio.AbstractEventLoop, number: int, before: Any) -> None:
    if sys.platform != "win32":
        loop.remove_signal_handler(number)  # Which sets a default of asyncio's own.
    signal.signal(number, before)
