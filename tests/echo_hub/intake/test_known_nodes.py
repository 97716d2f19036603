from __future__ import annotations

import asyncio
import time
from typing import cast

import pytest

from echo_hub.intake.known_nodes import LOOK_S, KnownNodes
from echo_hub.net.gateway import NodeInfo
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.known_nodes import read_counted_names
from echo_shared.errors import RefusedError
from echo_shared.records.run import CountedName
from echo_shared.wire.messages import RefusalCode


def node(node_id: str, name: str, *, host: str = "192.0.2.7", invite_id: int | None = None) -> NodeInfo:
    return NodeInfo(
        node_id=node_id,
        public_key=bytes(32),
        name=name,
        backend="torch",
        device="cpu",
        host=host,
        hub_host="hub",
        swarm_port=0,
        mesh_port=0,
        invite_id=invite_id,
    )


class Hub:
    def __init__(self) -> None:
        self.num_reads = 0
        self.books = [CountedName("ada", "Ada"), CountedName("twin", "Аda"), CountedName("ben", "Ben", invite_id=3)]
        self.names = KnownNodes(cast(AsyncStore, self))

    async def read(self, query: object) -> list[CountedName]:
        assert query is read_counted_names
        self.num_reads += 1
        await asyncio.sleep(0)
        return self.books

    async def refusal(self, one: NodeInfo) -> RefusedError | None:
        try:
            await self.names.check_name(one)
        except RefusedError as error:
            return error
        return None


@pytest.mark.parametrize("name", ["Ada", "ADA", "Аda", "Ｂen", "Вen"])
async def test_a_stranger_may_not_imitate_a_credited_nodes_name(name: str) -> None:
    refused = await Hub().refusal(node("new", name))
    assert refused is not None and refused.code == RefusalCode.NAME_TAKEN
    assert "--name" in str(refused) and "stays with its key" in str(refused)


async def test_the_first_of_two_similar_names_is_kept() -> None:
    hub = Hub()
    assert await hub.refusal(node("ada", "Ada")) is None
    refused = await hub.refusal(node("twin", "Аda"))
    assert refused is not None and "Ada (ada)" in str(refused)
    assert await hub.refusal(node("twin", "Twin")) is None


async def test_a_name_is_nobodys_before_work_has_counted() -> None:
    hub = Hub()
    assert await hub.refusal(node("new", "Cleo")) is None and await hub.refusal(node("newer", "Cleo")) is None
    hub.books = [*hub.books, CountedName("newer", "Cleo")]
    assert await hub.refusal(node("new", "Cleo")) is None, "the store is read only now and then"
    hub.names._read_at -= LOOK_S
    assert await hub.refusal(node("new", "Cleo")) is not None and await hub.refusal(node("newer", "Cleo")) is None


async def test_nodes_of_one_person_may_share_a_name() -> None:
    hub = Hub()
    assert await hub.refusal(node("new", "Ben", invite_id=3)) is None
    assert await hub.refusal(node("new", "Ben", invite_id=4)) is not None
    assert await hub.refusal(node("new", "Ben", host="127.0.0.1")) is None


async def test_nodes_that_join_at_once_share_one_database_read() -> None:
    hub = Hub()
    refused = await asyncio.gather(*(hub.refusal(node(f"new {number}", "Ada")) for number in range(3)))
    assert all(refused) and hub.num_reads == 1


async def test_a_hundred_thousand_names_do_not_hold_up_the_hub() -> None:
    hub = Hub()
    hub.books = [CountedName(str(number), f"node-{number:08x}") for number in range(100_000)]
    looking = asyncio.create_task(hub.refusal(node("new", "NODE-000000ff")))
    longest = 0.0
    while not looking.done():
        began_at = time.perf_counter()
        await asyncio.sleep(0.001)
        longest = max(longest, time.perf_counter() - began_at)
    assert await looking is not None and longest < 0.25
