from __future__ import annotations

import asyncio

import pytest

from echo_hub.net.turnstile import STRANGERS_TURN, FairQueue, Turnstile
from echo_shared.errors import RefusedError
from echo_shared.wire.messages import RefusalCode

SOON = 1e9
"""Turns per second: the next turn is always due at once."""


def queue(items: str) -> FairQueue[str]:
    """Return a queue of these items. An item's first character is its place (address); places get turns in rotation."""
    made: FairQueue[str] = FairQueue()
    for item in items.split():
        made.put(item[0], item)
    return made


def drained(left: FairQueue[str]) -> str:
    return " ".join(left.next() for _ in range(len(left)))


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        ("", ""),
        ("a1 a2 a3", "a1 a2 a3"),
        ("a1 a2 a3 b1", "a1 b1 a2 a3"),
        ("a1 a2 b1 c1 c2 b2", "a1 b1 c1 a2 b2 c2"),
    ],
)
def test_places_take_turns(items: str, turns: str) -> None:
    assert drained(queue(items)) == turns


def test_a_late_caller_from_a_new_place_does_not_wait_for_another_place() -> None:
    waiting = queue("a1 a2 a3 a4")
    assert waiting.next() == "a1"
    waiting.put("b", "b1")
    assert drained(waiting) == "a2 b1 a3 a4"


def test_the_newest_of_the_place_with_the_most_makes_room() -> None:
    waiting = queue("a1 b1 b2 b3 a2")
    assert waiting.drop() == "b3"
    assert drained(waiting) == "a1 b1 a2 b2"
    one = queue("a1")
    assert one.drop() == "a1" and not len(one)
    one.put("a", "a2")
    assert one.next() == "a2"


async def order(callers: list[tuple[str, bool]], *, most_waiting: int = 100) -> tuple[list[str], list[str]]:
    """Return the callers that got a turn, in order, and those that were refused. The first letter of a caller's name is
    its place (address).
    """
    turnstile = Turnstile(rate=SOON, most_waiting=most_waiting)
    had: list[str] = []
    refused: list[str] = []

    async def one(name: str, known: bool) -> None:
        try:
            await turnstile.turn(name[0], known=known)
        except RefusedError as error:
            assert error.code == RefusalCode.TOO_SOON
            refused.append(name)
        else:
            had.append(name)

    await asyncio.gather(*(one(name, known) for name, known in callers))
    return had, refused


async def test_a_stranger_of_another_address_waits_for_no_thousand() -> None:
    had, refused = await order([*((f"a{n}", False) for n in range(1_000)), ("b", False)], most_waiting=200)
    assert had.index("b") == 2
    assert len(had) == 201 and set(refused) == {f"a{n}" for n in range(200, 1_000)}


async def test_known_ones_go_first_and_strangers_get_some_turns() -> None:
    had, _ = await order(
        [("first", False), *((f"s{n}", False) for n in range(3)), *((f"k{n}", True) for n in range(9))]
    )
    assert "".join(name[0] for name in had) == "f" + ("k" * (STRANGERS_TURN - 1) + "s") * 3


async def test_strangers_leave_the_known_ones_their_room() -> None:
    callers = [*((f"s{n}", False) for n in range(9)), *((f"k{n}", True) for n in range(4))]
    had, refused = await order(callers, most_waiting=4)
    assert {name for name in had if name[0] == "k"} == {"k0", "k1", "k2", "k3"}
    assert all(name[0] == "s" for name in refused)


async def test_a_caller_that_left_takes_no_turn() -> None:
    turnstile = Turnstile(rate=SOON, most_waiting=10)
    await turnstile.turn("a")
    gone, stays = (asyncio.create_task(turnstile.turn("a")) for _ in range(2))
    while turnstile.num_waiting < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    gone.cancel()
    await stays
    assert gone.cancelled() and not turnstile.num_waiting


async def test_each_turn_of_the_event_loop_admits_one_caller() -> None:
    turnstile = Turnstile(rate=SOON, most_waiting=10)
    waiting = [asyncio.create_task(turnstile.turn("a")) for _ in range(5)]
    seen = set()
    while not all(one.done() for one in waiting):
        seen.add(sum(one.done() for one in waiting))
        await asyncio.sleep(0)
    assert seen >= {1, 2, 3, 4}
