from __future__ import annotations

from itertools import combinations
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from echo_hub.core.nodes.node import UNPROVEN, Node
from echo_hub.core.nodes.queues import ReadyQueues


def names(queues: ReadyQueues, oldest: int = 0, fastest: int = -99, slowest: int = 99, **how: object) -> list[str]:
    found = queues.first(oldest, fastest=fastest, slowest=slowest, **how)  # type: ignore[arg-type]
    return [node.node_id for node in found]


def filled() -> tuple[ReadyQueues, dict[str, Node]]:
    queues = ReadyQueues()
    nodes = {node_id: Node(node_id, window=1) for node_id in "abcd"}
    for node_id, place in {
        "a": (7, 0, -3),
        "b": (7, 1, -3),
        "c": (9, 0, 2),
        "d": (7, 0, -3),
    }.items():
        queues.put(nodes[node_id], place)
    return queues, nodes


def test_the_next_of_each_queue_best_first() -> None:
    queues, _ = filled()
    assert names(queues) == ["a", "c", "b"]
    assert names(queues, oldest=8) == ["c"]
    assert names(queues, slowest=0) == ["a", "b"]
    assert names(queues, fastest=0) == ["c"]
    assert names(queues, avoid=("a",)) == ["c", "d", "b"]


def test_a_node_goes_to_the_end_after_its_turn_or_a_change_of_place() -> None:
    queues, nodes = filled()
    assert queues.to_the_end(nodes["a"]), "d is next"
    assert names(queues) == ["c", "d", "b"]
    queues.put(nodes["d"], (7, 1, -3))
    assert names(queues) == ["c", "a", "b"]
    assert not queues.to_the_end(nodes["c"]), "it is alone there"
    assert not queues.to_the_end(Node("nobody", window=1))


def test_the_fastest_first_if_asked() -> None:
    queues, nodes = filled()
    queues.to_the_end(nodes["a"])
    assert names(queues, by_speed=True) == ["d", "c", "b"]


def test_a_node_without_a_place_is_not_found() -> None:
    queues, nodes = filled()
    for node in nodes.values():
        queues.put(node, None)
        queues.put(node, None)
    assert (names(queues), len(queues)) == ([], 0)


def test_a_waiting_node_is_noticed_if_slow_or_unmeasured() -> None:
    queues, a, e = ReadyQueues(), Node("a", window=1), Node("e", window=1)
    assert queues.put(a, (7, 0, -3))
    assert not queues.put(a, (7, 0, -3)), "the node has been there before"
    assert not queues.put(a, None)
    queues.notice_from = 2
    assert not queues.put(a, (8, 0, 1))
    assert queues.put(a, (8, 0, 2))
    assert queues.put(e, (8, 0, UNPROVEN))
    assert queues.num_unproven == 1
    queues.put(e, None)
    assert queues.num_unproven == 0


def test_a_waiting_node_is_noticed_once_it_heads_its_queue() -> None:
    queues, place = ReadyQueues(), (7, 0, -3)
    first, second, third = (Node(node_id, window=1) for node_id in "abc")
    assert queues.put(first, place)
    assert not queues.put(second, place) and not queues.put(third, place)
    assert (queues.is_found(first), queues.is_found(second)) == (True, False)
    assert not queues.put(second, None), "node a is still the first"
    assert queues.put(first, None) and queues.is_found(third)
    assert not queues.put(third, None), "no node is left"


def test_a_node_behind_the_avoided_ones_is_noticed() -> None:
    queues, place = ReadyQueues(), (7, 0, -3)
    queues.most_avoided = 1
    first, second, third = (Node(node_id, window=1) for node_id in "abc")
    assert queues.put(first, place) and queues.put(second, place)
    assert not queues.put(third, place)
    assert names(queues, avoid=("a",)) == ["b"]
    assert queues.put(second, None) and names(queues, avoid=("a",)) == ["c"]
    assert queues.put(first, None), "as no node was avoided, c could not be found before"


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.sampled_from(["put", "leave", "turn"])), max_size=60),
    st.integers(0, 2),
)
def test_every_newly_reachable_node_is_reported(changes: list[tuple[int, int, str]], most_avoided: int) -> None:
    """Searches may exclude up to `most_avoided` nodes. Each change that lets such a search find a new node must be
    reported.
    """
    queues, nodes = ReadyQueues(), [Node(str(number), window=1) for number in range(6)]
    queues.most_avoided = most_avoided
    avoided = [names for count in range(most_avoided + 1) for names in combinations([str(n) for n in range(6)], count)]
    for number, speed, what in changes:
        before = [set(names(queues, avoid=avoid)) for avoid in avoided]
        if what == "turn":
            told = queues.to_the_end(nodes[number])
        else:
            told = queues.put(nodes[number], (0, 0, speed) if what == "put" else None)
        after = [set(names(queues, avoid=avoid)) for avoid in avoided]
        moved = {str(number)} if what == "turn" else set()
        assert told or all(now <= then | moved for then, now in zip(before, after, strict=True))


def test_the_slowest_of_slow_nodes_and_of_other_nodes() -> None:
    queues, _ = filled()
    assert queues.slowest(0, 2) == (True, -3)
    assert queues.slowest(0, 3) == (False, 2)
    assert queues.slowest(8, 2) == (True, UNPROVEN)
    assert queues.slowest(10, -9) == (False, UNPROVEN)


def test_a_long_life_leaves_nothing_behind() -> None:
    chance, queues = Random(3), ReadyQueues()
    nodes = [Node(str(number), window=1) for number in range(20)]
    for _ in range(20_000):
        place = (chance.randrange(5), chance.randrange(2), chance.randrange(9))
        queues.put(chance.choice(nodes), place if chance.random() < 0.7 else None)
    for node in nodes:
        queues.put(node, None)
    assert len(queues) == 0 and names(queues) == []
