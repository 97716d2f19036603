"""Blocking work in a thread. A cancelled caller continues only after the thread's end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

_T = TypeVar("_T")


async def in_thread(work: Callable[[], _T], *, stop: threading.Event | None = None) -> _T:
    """Run `work` in a thread and return its result.

    A thread cannot be cancelled, and the caller may next delete files that the thread uses. So a cancelled call sets
    `stop`, the thread's request to end, and raises CancelledError only after the thread has ended, even if it is
    cancelled again.
    """
    thread = asyncio.get_running_loop().run_in_executor(
        None, work
    )  # This is a future, not a task: a closing loop cancels tasks.
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        if stop is not None:
            stop.set()
        while not thread.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({thread})
        if (error := thread.exception()) is not None:
            log.debug("Work that was cancelled also failed: %s", error)
        raise
