"""Ctrl-C, and the service manager's request to stop."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals(stop: Callable[[str], None]) -> Iterator[None]:
    """Calls `stop` in the running loop, with the signal's name, each time that one comes."""
    loop = asyncio.get_running_loop()

    def tell(number: int) -> None:
        stop(signal.Signals(number).name)

    if sys.platform != "win32":
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, tell, number)
        yield
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    else:
        for number in (signal.SIGINT, signal.SIGBREAK):
            signal.signal(number, lambda got, frame: loop.call_soon_threadsafe(tell, got))
        yield
