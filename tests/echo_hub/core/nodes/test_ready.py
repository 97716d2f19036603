from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from echo_hub.core.nodes.node import HUB_NODE_ID, NodeSettings, Samplers
from echo_hub.core.nodes.ready import Nodes


def make(samplers: Samplers = "by_version", lease_size: int = 4) -> Nodes:
    return Nodes(NodeSettings(samplers=samplers, lease_size=lease_size, deadline_s=1.0))


def join(nodes: Nodes, node_id: str, capacity: int, version: int | None = 0) -> None:
    nodes.connect(node_id)
    nodes.report(node_id, capacity, version)


def expire(nodes: Nodes, node_id: str, count: int, *, now: float) -> None:
    for _ in range(count):
        nodes.expire(node_id, now)


def next_id(nodes: Nodes, oldest: int = 0, avoid: tuple[str, ...] = ()) -> str | None:
    node = nodes.next_ready(oldest, avoid)
    return None if node is None else node.node_id


def test_a_node_gets_work_only_once_it_reports_capacity_and_a_version() -> None:
    nodes = make()
    nodes.connect("a")
    assert next_id(nodes) is None
    nodes.report("a", 4, None)
    assert next_id(nodes) is None
    nodes.report("a", 0, 0)
    assert next_id(nodes) is None
    nodes.report("a", 4, 0)
    assert next_id(nodes) == "a"
    nodes.report("stranger", 4, 0)
    assert nodes.num_connected == 1


def test_the_least_loaded_share_is_next_then_whoever_waited_longest() -> None:
    nodes = make()
    join(nodes, "big", 40)
    join(nodes, "small", 8)
    order = []
    for lease_id in range(1, 8):
        node = nodes.next_ready(0, ())
        assert node is not None
        order.append(node.node_id)
        nodes.take(node.node_id, 4, lease_id)
    assert order == ["big", "small", "big", "big", "big", "big", "small"]


def test_equal_nodes_take_turns() -> None:
    nodes = make()
    for node_id in "cab":
        join(nodes, node_id, 4)
    order = []
    for lease_id in range(1, 7):
        node = nodes.next_ready(0, ())
        assert node is not None
        order.append(node.node_id)
        nodes.take(node.node_id, 4, lease_id)
        for _ in range(4):
            nodes.release(node.node_id, overdue=False)
    assert order == ["a", "b", "c", "a", "b", "c"]


def test_a_node_waits_until_a_whole_group_fits() -> None:
    nodes = make()
    join(nodes, "a", 6)
    nodes.take("a", 4, 1)
    for _ in range(2):
        assert next_id(nodes) is None
        nodes.release("a", overdue=False)
    assert next_id(nodes) == "a"


def test_a_node_smaller_than_a_group_works_in_halves() -> None:
    nodes = make(lease_size=8)
    join(nodes, "a", 3)
    nodes.take("a", 3, 1)
    nodes.release("a", overdue=False)
    assert next_id(nodes) is None
    nodes.release("a", overdue=False)
    assert next_id(nodes) == "a"


def test_overdue_rollouts_take_up_no_capacity_but_cost_the_place() -> None:
    nodes = make()
    join(nodes, "silent", 4)
    nodes.take("silent", 4, 1)
    expire(nodes, "silent", 4, now=0.0)
    nodes.wake(0.0)
    assert next_id(nodes) == "silent"
    join(nodes, "quick", 8)
    nodes.take("quick", 4, 2)
    assert next_id(nodes) == "quick"


def test_versions_decide_in_async_mode_alone() -> None:
    nodes = make()
    join(nodes, "old", 4, 1)
    join(nodes, "new", 4, 3)
    assert (next_id(nodes, 2), next_id(nodes, 4)) == ("new", None)
    assert (nodes.num_candidates(0), nodes.num_candidates(2), nodes.num_candidates(0, ["old", "gone"])) == (2, 1, 1)
    nodes.report("old", 4, 4)
    assert next_id(nodes, 4) == "old"
    sequential = make("any")
    join(sequential, "old", 4, 0)
    assert next_id(sequential) == "old"


def test_only_the_hub_samples_in_colocated_mode() -> None:
    nodes = make("hub")
    join(nodes, "a", 4)
    assert next_id(nodes) is None
    join(nodes, HUB_NODE_ID, 4)
    assert next_id(nodes) == HUB_NODE_ID
    nodes.take(HUB_NODE_ID, 1, 1)
    nodes.fail(HUB_NODE_ID, 0.0)
    nodes.expire(HUB_NODE_ID, 0.0)
    assert next_id(nodes) == HUB_NODE_ID


def test_nodes_to_avoid_keep_their_place() -> None:
    nodes = make()
    for node_id in "abc":
        join(nodes, node_id, 4)
    assert next_id(nodes, avoid=("a", "b")) == "c"
    assert next_id(nodes, avoid=("a", "b", "c")) is None
    assert next_id(nodes) == "a"


def test_a_node_that_left_is_remembered_while_it_holds_work() -> None:
    nodes = make()
    join(nodes, "a", 4)
    nodes.take("a", 2, 1)
    nodes.disconnect("a")
    nodes.disconnect("stranger")
    assert (next_id(nodes), nodes.held_by_node, nodes.num_candidates(0)) == (None, {"a": 2}, 0)
    join(nodes, "a", 6)
    assert next_id(nodes) == "a"
    nodes.disconnect("a")
    nodes.release("a", overdue=False)
    nodes.release("a", overdue=False)
    assert nodes.held_by_node == {}
    with pytest.raises(KeyError):
        nodes.release("a", overdue=False)


def test_reports_without_end_need_no_memory_without_end() -> None:
    nodes = make()
    for node_id in "ab":
        join(nodes, node_id, 4)
    for turn in range(10_000):
        nodes.report("b", 4 * (turn % 2), 0)
    nodes.report("b", 4, 0)
    assert nodes.num_places <= 2 * nodes.num_known
    nodes.take("a", 4, 1)
    assert next_id(nodes) == "b"


def test_versions_without_end_need_no_memory_without_end() -> None:
    nodes = make()
    for node_id in map(str, range(100)):
        join(nodes, node_id, 8)
    for version in range(1, 1_000):
        for number in range(100):
            nodes.report(str(number), 8, max(0, version - number % 7))
            assert nodes.num_places <= 200
    assert (nodes.num_candidates(0), nodes.num_candidates(999), next_id(nodes, 999)) == (100, 15, "0")


def test_whatever_nodes_go_through_there_are_at_most_two_places_a_node() -> None:
    chance, nodes, now = Random(7), make(), 0.0
    held: Counter[str] = Counter()
    for lease_id in range(20_000):
        node_id, now = f"n{chance.randrange(30)}", now + 0.01
        match chance.randrange(9):
            case 0:
                join(nodes, node_id, 8)
            case 1:
                nodes.disconnect(node_id)
            case 2:
                nodes.fail(node_id, now)
            case 3:
                nodes.trust(node_id)
            case 4 if held[node_id]:
                nodes.release(node_id, overdue=False)
                held[node_id] -= 1
            case 5 if lease_id % 50 == 0:
                nodes.wake(now)
            case 6 if (node := nodes.next_ready(lease_id // 1_000, (node_id,))) is not None:
                nodes.take(node.node_id, 1, lease_id)
                held[node.node_id] += 1
            case _:
                nodes.report(node_id, chance.randrange(12), chance.randrange(lease_id // 1_000 + 1))
        assert nodes.num_places <= 2 * nodes.num_known


class Compared(int):
    """A number that counts how often it was compared."""

    times = 0

    def __lt__(self, other: int) -> bool:
        Compared.times += 1
        return int(self) < other

    def __gt__(self, other: int) -> bool:
        Compared.times += 1
        return int(self) > other

    def __le__(self, other: int) -> bool:
        Compared.times += 1
        return int(self) <= other

    def __ge__(self, other: int) -> bool:
        Compared.times += 1
        return int(self) >= other


def test_to_find_the_next_node_takes_no_more_work_the_more_versions_there_were() -> None:
    nodes = make()
    for node_id in map(str, range(100)):
        join(nodes, node_id, 8)
    for version in range(1, 2_000):
        for number in range(100):
            nodes.report(str(number), 8, version)
    Compared.times = 0
    assert next_id(nodes, Compared(1_999)) == "0"
    assert nodes.num_candidates(Compared(1_999)) == 100
    assert 0 < Compared.times <= 2, "all have one version"
    for number in range(100):
        nodes.report(str(number), 8, number)
    Compared.times = 0
    assert next_id(nodes, Compared(90)) == "90"
    assert Compared.times < 50, "fewer than there are versions"
