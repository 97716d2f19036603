"""Work that blocks, off the event loop, and never left running behind its caller's back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

_T = TypeVar("_T")


async def in_thread(work: Callable[[], _T], *, on_cancel: Callable[[], None] = lambda: None) -> _T:
    """The result of `work`, done in a thread.

    A thread cannot be cancelled, and what comes next may delete its files: when this call is cancelled it calls
    `on_cancel`, which may ask the thread to stop, and raises only once the thread has ended, however often it is
    cancelled meanwhile.
    """
    thread = asyncio.get_running_loop().run_in_executor(None, work)  # No task: the loop's own end cancels those.
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        on_cancel()
        while not thread.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({thread})
        if (error := thread.exception()) is not None:
            log.debug("Work that was cancelled had failed: %s", error)
        raise
