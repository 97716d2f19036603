from __future__ import annotations

import asyncio

import pytest

from echo_hub.net.silence import Silence

SHORT_S = 0.02


async def test_who_says_nothing_is_waited_for_no_longer() -> None:
    with pytest.raises(TimeoutError):
        async with Silence(SHORT_S) as silence:
            silence.listens()
            await asyncio.Event().wait()


async def test_what_is_heard_may_be_worked_on_for_longer_and_then_it_counts_anew() -> None:
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
    assert loop.time() >= began_at + SHORT_S, "it began anew"


async def test_nothing_is_left_of_it() -> None:
    async with Silence(SHORT_S) as silence:
        silence.listens()
    later = asyncio.Event()
    asyncio.get_running_loop().call_later(2 * SHORT_S, later.set)
    await later.wait()
