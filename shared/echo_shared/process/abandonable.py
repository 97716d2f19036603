"""Blocking work in a thread that is abandoned when its caller is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

_Result = TypeVar("_Result")


async def abandonable(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Run `function` in a new thread; return its result or raise its error.

    If the caller is cancelled, the thread continues, at most until the process ends. (asyncio.to_thread would delay
    that end: a process waits for its threads.) So `function` must not hold anything that has to be closed.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Result] = loop.create_future()

    def run() -> None:
        try:
            result = function(*arguments)
        except Exception as error:  # noqa: BLE001  # Raised in the caller.
            tell = partial(done.set_exception, error)
        else:
            tell = partial(done.set_result, result)
        with suppress(RuntimeError):  # RuntimeError: the event loop is closed, so no caller waits for the result.
            loop.call_soon_threadsafe(lambda: None if done.done() else tell())

    threading.Thread(target=run, name=f"abandonable-{function.__name__}", daemon=True).start()
    return await done
