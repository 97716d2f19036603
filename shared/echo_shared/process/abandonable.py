"""Work in a thread that a stopped command does not wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

_Result = TypeVar("_Result")


async def abandonable(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Return or raise what `function` does, in a thread of its own.

    Unlike asyncio.to_thread, whose threads a process waits for when it ends: once this is cancelled, the thread is left
    to itself and ends with the process. So `function` must leave nothing behind that has to be closed.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Result] = loop.create_future()

    def tell(setter: Callable[[Any], None], outcome: Any) -> None:
        with suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            loop.call_soon_threadsafe(lambda: None if done.done() else setter(outcome))

    def run() -> None:
        try:
            result = function(*arguments)
        except Exception as error:  # noqa: BLE001  # Raised where it is waited for.
            tell(done.set_exception, error)
        else:
            tell(done.set_result, result)

    threading.Thread(target=run, name=f"abandonable-{function.__name__}", daemon=True).start()
    return await done
