from __future__ import annotations

from random import Random

from echo_hub.core.nodes.node import UNPROVEN, Node
from echo_hub.core.nodes.queues import ReadyQueues


def names(queues: ReadyQueues, oldest: int = 0, fastest: int = -99, slowest: int = 99, **how: object) -> list[str]:
    found = queues.first(oldest, fastest=fastest, slowest=slowest, **how)  # type: ignore[arg-type]
    return [node.node_id for node in found]


def filled() -> ReadyQueues:
    queues = ReadyQueues()
    for node_id, place in {
        "a": (7, 0, -3),
        "b": (7, 1, -3),
        "c": (9, 0, 2),
        "d": (7, 0, -3),
    }.items():
        queues.put(Node(node_id, window=1), place)
    return queues


def test_the_next_of_each_queue_best_first() -> None:
    queues = filled()
    assert names(queues) == ["a", "c", "b"]
    assert names(queues, oldest=8) == ["c"]
    assert names(queues, slowest=0) == ["a", "b"]
    assert names(queues, fastest=0) == ["c"]
    assert names(queues, avoid=("a",)) == ["c", "d", "b"]


def test_who_had_a_turn_goes_to_the_end_and_a_change_of_place_too() -> None:
    queues = filled()
    queues.to_the_end("a")
    assert names(queues) == ["c", "d", "b"]
    queues.put(Node("d", window=1), (7, 1, -3))
    assert names(queues) == ["c", "a", "b"]
    queues.to_the_end("nobody")


def test_the_fastest_first_if_asked() -> None:
    queues = filled()
    queues.to_the_end("a")
    assert names(queues, by_speed=True) == ["d", "c", "b"]


def test_who_has_no_place_is_not_found() -> None:
    queues = filled()
    for node_id in "abcd":
        queues.put(Node(node_id, window=1), None)
        queues.put(Node(node_id, window=1), None)
    assert (names(queues), len(queues)) == ([], 0)


def test_who_comes_to_wait_is_noticed_if_slow_enough_or_not_measured_yet() -> None:
    queues = filled()
    assert not queues.put(Node("a", window=1), None)
    assert queues.put(Node("a", window=1), (7, 0, -3))
    assert not queues.put(Node("a", window=1), (7, 0, -3)), "it has been there before"
    queues.notice_from = 2
    assert not queues.put(Node("a", window=1), (8, 0, 1))
    assert queues.put(Node("a", window=1), (8, 0, 2))
    assert queues.put(Node("e", window=1), (8, 0, UNPROVEN))
    assert queues.num_unproven == 1
    queues.put(Node("e", window=1), None)
    assert queues.num_unproven == 0


def test_the_slowest_of_those_that_are_slow_enough_and_of_the_others() -> None:
    queues = filled()
    assert queues.slowest(0, 2) == (True, -3)
    assert queues.slowest(0, 3) == (False, 2)
    assert queues.slowest(8, 2) == (True, UNPROVEN)
    assert queues.slowest(10, -9) == (False, UNPROVEN)


def test_a_long_life_leaves_nothing_behind() -> None:
    chance, queues = Random(3), ReadyQueues()
    for _ in range(20_000):
        node = Node(str(chance.randrange(20)), window=1)
        place = (chance.randrange(5), chance.randrange(2), chance.randrange(9))
        queues.put(node, place if chance.random() < 0.7 else None)
    for number in range(20):
        queues.put(Node(str(number), window=1), None)
    assert len(queues) == 0 and names(queues) == []
