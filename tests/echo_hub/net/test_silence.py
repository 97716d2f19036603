from __future__ import annotations

import asyncio

import pytest

from echo_hub.net.silence import Silence

SHORT_S = 0.02


async def test_a_silent_peer_times_out() -> None:
    with pytest.raises(TimeoutError):
        async with Silence(SHORT_S) as silence:
            silence.listens()
            await asyncio.Event().wait()


async def test_handling_a_message_may_take_longer_and_then_the_timeout_restarts() -> None:
    looked = asyncio.Event()
    loop = asyncio.get_running_loop()
    with pytest.raises(TimeoutError):
        async with Silence(SHORT_S) as silence:
            silence.listens()
            silence.heard()
            loop.call_later(3 * SHORT_S, looked.set)
            await looked.wait()
            began_at = loop.time()
            silence.listens()
            await asyncio.Event().wait()
    assert loop.time() >= began_at + SHORT_S, "the timeout started again"


async def test_a_silence_timer_leaves_no_task() -> None:
    async with Silence(SHORT_S) as silence:
        silence.listens()
    later = asyncio.Event()
    asyncio.get_running_loop().call_later(2 * SHORT_S, later.set)
    await later.wait()
