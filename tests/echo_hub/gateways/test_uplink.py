from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.harness.broker import broker_process, lacking
from echo_hub.config.gateways_section import GatewaysConfig
from echo_hub.gateways import uplink as uplink_module
from echo_hub.gateways.broker import Broker
from echo_hub.gateways.items import AROUND_BYTES, Item, ItemKind
from echo_hub.gateways.sealing import Seal
from echo_hub.gateways.uplink import GatewayUplink
from echo_shared.signing.identity import Identity
from tests.echo_hub.net.gateway_parts import DEADLINE_S

pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking())


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    with broker_process(tmp_path) as running:
        opened = await Broker.open(GatewaysConfig(url=running.url), name="test")
        await opened.make_stream("stream", "subject")
        yield opened
        await opened.close()


def item(number: int) -> Item:
    return [ItemKind.LEFT, "node", number]


async def store(uplink: GatewayUplink, parts: list[list[Item]]) -> None:
    async for items in uplink.stored("subject"):
        parts.append(items)


async def test_a_full_uplink_blocks_senders_and_keeps_the_order(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uplink_module, "WAITING_BYTES", 10 * AROUND_BYTES)
    parts: list[list[Item]] = []
    uplink = GatewayUplink(broker, Seal(Identity.generate()), name="gateway")

    async def put_all() -> None:
        for number in range(100):
            await uplink.put(item(number), 0)

    putting = asyncio.create_task(put_all())
    for _ in range(100):
        await asyncio.sleep(0)
    assert not putting.done(), "the queue holds ten"
    storing = asyncio.create_task(store(uplink, parts))
    async with asyncio.timeout(DEADLINE_S):
        await putting
        await uplink.flushed()
    assert [one for part in parts for one in part] == [item(number) for number in range(100)]
    assert len(parts) == await broker.waiting("stream") < 20
    storing.cancel()
    await asyncio.wait([storing])


async def test_only_a_message_of_one_item_may_exceed_the_size_limit(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uplink_module, "STORED_BYTES", 2_000)
    parts: list[list[Item]] = []
    uplink = GatewayUplink(broker, Seal(Identity.generate()), name="gateway")
    for size in (100, 5_000, 900, 900, 100):
        await uplink.put([ItemKind.SAID, "node", 1, bytes(size)], size)
    storing = asyncio.create_task(store(uplink, parts))
    async with asyncio.timeout(DEADLINE_S):
        await uplink.flushed()
    assert [[len(one[3]) for one in part] for part in parts] == [[100], [5_000], [900], [900, 100]]
    storing.cancel()
    await asyncio.wait([storing])


async def test_items_taken_before_a_cancel_are_stored_once(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink_module, "GATHER_S", 0.0)
    parts: list[list[Item]] = []
    uplink = GatewayUplink(broker, Seal(Identity.generate()), name="gateway")
    await uplink.put(item(1), 0)
    storing = asyncio.create_task(store(uplink, parts))
    for _ in range(5):
        await asyncio.sleep(0)
    assert uplink._in_hand and not parts
    storing.cancel()
    await asyncio.wait([storing])
    again = asyncio.create_task(store(uplink, parts))
    async with asyncio.timeout(DEADLINE_S):
        await uplink.flushed()
    assert parts == [[item(1)]] and await broker.waiting("stream") == 1
    again.cancel()
    await asyncio.wait([again])
