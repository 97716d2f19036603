"""Real signals to a real process: each is delivered once, and afterwards the previous handlers are restored."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from echo_node.host.signals import run_until_stopped, stop_signals


class Work(asyncio.Queue[str]):
    """Work that can be stopped. It queues the reason of each request to stop."""

    def request_stop(self, reason: str) -> None:
        self.put_nowait(reason)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no kill that a handler sees")
async def test_each_signal_is_reported() -> None:
    told = Work()
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals(told):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
            assert await asyncio.wait_for(told.get(), 10) == f"got {signal.Signals(number).name}"
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no kill that a handler sees")
async def test_earlier_handlers_are_restored() -> None:
    outer = Work()
    inner = Work()
    before = signal.getsignal(signal.SIGINT)
    with stop_signals(outer, (signal.SIGINT,)):
        with stop_signals(inner):
            os.kill(os.getpid(), signal.SIGINT)
            assert await asyncio.wait_for(inner.get(), 10) == "got SIGINT"
        os.kill(os.getpid(), signal.SIGINT)
        assert await asyncio.wait_for(outer.get(), 10) == "got SIGINT"
        assert inner.empty()
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no kill that a handler sees")
def test_ctrl_c_cancels_the_running_task() -> None:
    cleaned_up = []
    before = signal.getsignal(signal.SIGINT)

    async def main() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            cleaned_up.append(True)

    with pytest.raises(asyncio.CancelledError):
        run_until_stopped(main())
    assert cleaned_up == [True]
    assert signal.getsignal(signal.SIGINT) == before


def test_a_task_that_ends_by_itself_returns_its_result() -> None:
    async def main() -> int:
        return 3

    assert run_until_stopped(main()) == 3
