from __future__ import annotations

from echo_hub.core.nodes.node import HUB_NODE_ID, Node


def test_what_is_overdue_takes_up_no_room() -> None:
    node = Node("a", capacity=8, held=6, overdue=4)
    assert (node.in_flight, node.free) == (2, 6)


def test_a_node_that_asks_for_less_than_it_holds_has_no_room() -> None:
    assert Node("a", capacity=2, held=6).free == -4


def test_the_hub_is_known_by_its_name() -> None:
    assert Node(HUB_NODE_ID).is_hub and not Node("a").is_hub
