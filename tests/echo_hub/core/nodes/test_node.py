from __future__ import annotations

from echo_hub.core.nodes.node import HUB_NODE_ID, Node


def test_overdue_rollouts_use_no_capacity() -> None:
    node = Node("a", window=99, capacity=8, held=6, overdue=4)
    assert (node.in_flight, node.free) == (2, 6)


def test_a_node_that_asks_for_less_than_it_holds_has_no_room() -> None:
    assert Node("a", window=99, capacity=2, held=6).free == -4


def test_a_claim_counts_as_far_as_it_is_earned_and_of_use() -> None:
    node = Node("a", window=4, capacity=4_096)
    assert node.limit == 4
    node.window = 64
    node.pace.takes = 11
    assert node.limit == 11
    node.capacity = 0
    assert node.limit == 0


def test_the_hub_is_known_by_its_name() -> None:
    assert Node(HUB_NODE_ID, window=4).is_hub and not Node("a", window=4).is_hub
