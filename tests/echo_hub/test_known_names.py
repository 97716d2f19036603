from __future__ import annotations

import pytest

from echo_hub.known_names import LOOK_S, CountedNode, KnownNames
from echo_hub.net.gateway import NodeInfo
from echo_shared.errors import RefusedError
from echo_shared.messages import RefusalCode


def counted(node_id: str, name: str, invite_id: int | None = None) -> CountedNode:
    return CountedNode(node_id=node_id, name=name, first_seen=1.0, invite_id=invite_id)


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
    """What its books say, and the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.books = [counted("ada", "Ada"), counted("twin", "Аda"), counted("ben", "Ben", invite_id=3)]
        self.names = KnownNames(self.read, clock=lambda: self.now)

    async def read(self) -> list[CountedNode]:
        return self.books

    async def refusal(self, one: NodeInfo) -> RefusedError | None:
        try:
            await self.names.check(one)
        except RefusedError as error:
            return error
        return None


@pytest.mark.parametrize("name", ["Ada", "ADA", "Аda", "Ｂen", "Вen"])
async def test_a_stranger_may_not_look_like_a_node_whose_work_has_counted(name: str) -> None:
    refused = await Hub().refusal(node("new", name))
    assert refused is not None and refused.code == RefusalCode.NAME_TAKEN
    assert "--name" in str(refused) and "stays with its key" in str(refused)


async def test_of_two_that_look_alike_the_first_keeps_its_name_and_the_other_is_told() -> None:
    hub = Hub()
    assert await hub.refusal(node("ada", "Ada")) is None
    refused = await hub.refusal(node("twin", "Аda"))
    assert refused is not None and "Ada (ada)" in str(refused)
    assert await hub.refusal(node("twin", "Twin")) is None


async def test_a_name_is_nobodys_before_work_has_counted() -> None:
    hub = Hub()
    assert await hub.refusal(node("new", "Cleo")) is None and await hub.refusal(node("newer", "Cleo")) is None
    hub.books = [*hub.books, counted("newer", "Cleo")]
    assert await hub.refusal(node("new", "Cleo")) is None, "the books are read now and then"
    hub.now += LOOK_S
    assert await hub.refusal(node("new", "Cleo")) is not None and await hub.refusal(node("newer", "Cleo")) is None


async def test_one_persons_nodes_and_the_operators_may_share_a_name() -> None:
    hub = Hub()
    assert await hub.refusal(node("new", "Ben", invite_id=3)) is None
    assert await hub.refusal(node("new", "Ben", invite_id=4)) is not None
    assert await hub.refusal(node("new", "Ben", host="127.0.0.1")) is None
