"""A call returns only after its thread has ended, even if the call is cancelled several times."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from echo_shared.process.threads import in_thread


async def test_results_and_errors_come_through() -> None:
    assert await in_thread(lambda: threading.current_thread() is not threading.main_thread())
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


@pytest.mark.parametrize("end", [lambda: None, lambda: 1 // 0])
async def test_a_cancelled_call_ends_with_its_thread(end: Callable[[], object]) -> None:
    begun, may_end, asked, ended = threading.Event(), threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait()
        ended.set()
        end()

    call = asyncio.create_task(in_thread(work, stop=asked))
    await asyncio.to_thread(begun.wait)
    for _ in range(3):
        call.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not call.done() and asked.is_set()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ended.is_set()
