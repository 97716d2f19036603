import asyncio

import pytest

from echo_node.net import flow as flow_module
from echo_node.net.flow import SMALL_BYTES, Flow


async def test_all_traffic_counts_and_large_messages_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    counted: list[tuple[int, int]] = []

    class Meter:
        def count(self, *, sent: int = 0, received: int = 0) -> None:
            counted.append((sent, received))

    async def sleep(delay_s: float) -> None:
        waited.append(round(delay_s))

    monkeypatch.setattr(flow_module.asyncio, "sleep", sleep)
    flow = Flow(10_000, Meter())
    await flow.received(100_000)
    await flow.received(SMALL_BYTES)
    await flow.received(100_000)
    flow.sent(7)
    assert counted == [(0, 100_000), (0, SMALL_BYTES), (0, 100_000), (7, 0)]
    assert waited == [10, 20], "small messages in between do not wait, but count"


async def test_no_cap_waits_for_nothing() -> None:
    async with asyncio.timeout(60):
        await Flow().received(2**50)
