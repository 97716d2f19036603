from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from echo_hub.intake import totals as totals_module
from echo_hub.intake.totals import TotalsNews, as_message
from echo_hub.net.gateway import NodeInfo
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.credits import Credit
from echo_hub.store.store import Store
from echo_shared.wire.messages import DroppedCount, FromHub, Totals
from tests.echo_hub.store.conftest import Records

HEARS = NodeInfo(
    node_id="a",
    public_key=bytes(32),
    name="n",
    backend="torch",
    device="cpu",
    host="127.0.0.1",
    hub_host="127.0.0.1",
    swarm_port=0,
    mesh_port=0,
    hears_totals=True,
)


class Bench:
    def __init__(self, store: AsyncStore) -> None:
        self.store = store
        self.nodes: dict[str, NodeInfo] = {}
        self.sent: list[tuple[str, FromHub]] = []
        self.news = asyncio.Event()
        self.totals = TotalsNews(store=store, nodes=self.nodes, connections=self)

    def send(self, node_id: str, message: FromHub) -> bool:
        self.sent.append((node_id, message))
        self.news.set()

    def join(self, node_id: str, *, hears: bool = True) -> None:
        self.nodes[node_id] = replace(HEARS, node_id=node_id, hears_totals=hears)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.news.clear()
                await self.news.wait()

    def trained(self) -> dict[str, int]:
        """Return, by node, the total of trained rollouts that the node was told last."""
        return {node_id: message.trained_rollouts for node_id, message in self.sent if isinstance(message, Totals)}


@pytest.fixture
def bench(tmp_path: Any) -> Iterator[Bench]:
    store = Store.open(f"sqlite:///{tmp_path / 'echo.db'}")
    yield Bench(AsyncStore(store))
    store.close()


async def test_each_node_is_told_its_totals_once_and_after_changes(bench: Bench) -> None:
    bench.store.store.apply(Records.one_step(1, lease_id=1, group_id=0, node_id="a"), now=1.0)
    bench.join("a")
    bench.join("b")
    await bench.totals.tell_all()
    assert bench.trained() == {"a": 2, "b": 0}
    await bench.totals.tell_all()
    assert len(bench.sent) == 2, "nothing has changed"
    bench.store.store.apply(Records.one_step(2, lease_id=2, group_id=1, node_id="b"), now=1.0)
    await bench.totals.tell_all()
    assert bench.trained() == {"a": 2, "b": 2} and len(bench.sent) == 4, "the other node's share changed too"


async def test_a_node_that_connects_again_is_told_again(bench: Bench) -> None:
    bench.join("a")
    await bench.totals.tell_new()
    await bench.totals.tell_new()
    assert len(bench.sent) == 1
    bench.join("a")
    await bench.totals.tell_new()
    assert len(bench.sent) == 2
    del bench.nodes["a"]
    await bench.totals.tell_all()
    bench.join("a")
    await bench.totals.tell_all()
    assert len(bench.sent) == 3


async def test_a_node_that_does_not_know_the_message_is_not_sent_it(bench: Bench) -> None:
    bench.join("old", hears=False)
    await bench.totals.tell_all()
    await bench.totals.tell_new()
    assert bench.sent == []


async def test_new_nodes_and_changes_are_reported_for_ever(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(totals_module, "FIRST_S", 0.001)
    monkeypatch.setattr(totals_module, "EVERY_S", 0.01)
    telling = asyncio.create_task(bench.totals.run())
    bench.join("a")
    await bench.until(lambda: bench.trained() == {"a": 0})
    bench.store.store.apply(Records.one_step(1, lease_id=1, group_id=0, node_id="a"), now=1.0)
    await bench.until(lambda: bench.trained() == {"a": 2})
    telling.cancel()
    await asyncio.wait([telling])


def test_the_message_equals_the_stored_totals() -> None:
    credit = Credit(trained=1, trained_tokens=9, evaluated=2, dropped={"stale": 3}, share=0.5, rank=4, num_ranked=5)
    told = as_message("0123456789abcdef" * 2, credit)
    assert told.dropped == (DroppedCount(reason="stale", rollouts=3),)
    assert (told.rank, told.num_ranked, told.trained_tokens) == (4, 5, 9)
    assert told.page.startswith("/nodes/0123") and len(told.page) < 40, "a part of the id is enough"
