"""The end of standard input, by which a program that has started a node tells it to stop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress


def when_stdin_ends(call: Callable[[], None]) -> None:
    """Calls `call` on the event loop that runs now, then.

    A daemon thread waits, because a read of standard input can be neither awaited nor cancelled everywhere.
    """
    loop = asyncio.get_running_loop()

    def wait() -> None:
        # Not through sys.stdin: its lock, held by this thread, would abort the interpreter at its end.
        while os.read(0, 4_096):
            pass
        with suppress(RuntimeError):  # The loop has ended before its standard input did.
            loop.call_soon_threadsafe(call)

    threading.Thread(target=wait, name="stdin", daemon=True).start()
