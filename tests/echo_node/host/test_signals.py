"""Real signals to a real process: each is told, and afterwards they are the system's again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from echo_node.host.signals import stop_signals


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no kill that a handler sees")
async def test_each_signal_is_told() -> None:
    told: asyncio.Queue[str] = asyncio.Queue()
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals(told.put_nowait):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
            assert await asyncio.wait_for(told.get(), 10) == signal.Signals(number).name
    assert signal.getsignal(signal.SIGTERM) == before
