from __future__ import annotations

from echo_hub.core.nodes.node import Node
from echo_hub.core.nodes.origins import ORIGIN_SHARE, Origins


def stranger(name: str, origin: str) -> Node:
    return Node(name, 4, origin=origin)


def test_an_origin_may_hold_a_part_of_the_strangers_limit_at_least_one() -> None:
    origins = Origins()
    home = [stranger(str(number), "192.0.2.1") for number in range(4)]
    assert [origins.enter(node, 2 * ORIGIN_SHARE) for node in home] == [True, True, False, False]
    assert origins.enter(stranger("x", "192.0.2.2"), 1)
    assert not origins.enter(stranger("y", "192.0.2.2"), 1)


def test_a_freed_place_goes_to_the_node_that_waited_longest() -> None:
    origins = Origins()
    first, second, third = (stranger(name, "here") for name in "abc")
    assert origins.enter(first, 4) and origins.enter(first, 4)
    assert not origins.enter(second, 4) and not origins.enter(third, 4)
    origins.leave(first)
    assert not first.has_place
    assert origins.next_waiting("here") == "b" and origins.enter(second, 4)
    assert origins.next_waiting("here") == "c" and origins.next_waiting("here") is None


def test_nodes_without_an_origin_share_no_limit() -> None:
    origins = Origins()
    assert all(origins.enter(stranger(str(number), ""), 1) for number in range(100))
