from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo_hub.core.nodes.node import Node
from echo_hub.core.nodes.strangers import LEAST, LOST, LUMP, ORIGIN_SHARE, UNPROVEN_SHARE, USED, Origins, Strangers


def strangers(*, base: int = 8, holding: int = 0) -> Strangers:
    made = Strangers(base=base)
    made.count(holding)
    return made


def first_returns(made: Strangers) -> None:
    made.count(-1)
    made.returned()


def fill(made: Strangers) -> None:
    made.count(made.may_hold - made.in_flight)


def test_new_strangers_may_hold_a_share_of_a_step_or_of_all_held_work() -> None:
    made = strangers(base=8)
    assert made.may_hold == 8
    made.count(20 * UNPROVEN_SHARE, is_stranger=False)
    assert made.may_hold == 20


def test_strangers_at_their_limit_wait_until_a_lump_is_free() -> None:
    made, lump = strangers(base=4 * LUMP), 4
    made.count(4 * LUMP - 1)
    assert not made.is_full
    made.count(1)
    assert made.is_full
    for _ in range(lump - 1):
        made.count(-1)
        assert made.is_full, "a single free place is not worth a search"
    made.count(-1)
    assert not made.is_full
    made.count(lump - 1)
    assert not made.is_full, "there is still room for one"
    made.count(1)
    assert made.is_full
    made.count(4 * LUMP * UNPROVEN_SHARE, is_stranger=False)
    assert not made.is_full, "others hold more, so strangers may hold more too"


def test_of_few_each_that_is_free_is_given_at_once() -> None:
    made = strangers(base=1)
    made.count(1)
    assert made.is_full
    made.count(-1)
    assert not made.is_full


def test_returned_work_doubles_the_strangers_limit() -> None:
    made, seen = strangers(base=8), []
    for _ in range(5):
        fill(made)
        seen.append(made.in_flight)
        for _ in range(made.in_flight):
            first_returns(made)
            fill(made)
    assert seen == [8, 16, 32, 64, 128]


def test_lost_work_lowers_the_strangers_limit_twice_as_fast() -> None:
    made = strangers(base=8, holding=30)
    for _ in range(20):
        made.count(1)
        first_returns(made)
    assert made.may_hold == 28
    made.lost()
    assert made.may_hold == 28 - LOST
    for _ in range(100):
        made.lost()
    assert made.may_hold == 8 // LEAST, "an attack does not shut newcomers out"
    assert strangers(base=1).may_hold == 1
    for _ in range(8):
        made.count(1)
        first_returns(made)
    assert made.may_hold == 8, "and the limit soon recovers"


def test_earned_limits_are_not_saved_up() -> None:
    """Many successes of unknown keys may raise the number of rollouts that such keys hold together by only 1. Otherwise
    an attacker could first behave well, and later let many silent keys take rollouts at once.
    """
    made = strangers(base=8)
    for _ in range(1_000):
        made.count(1)
        first_returns(made)
    assert made.may_hold <= 9


@given(st.lists(st.booleans(), max_size=400), st.integers(1, 64))
def test_work_lost_to_silent_keys_is_bounded_by_honest_returns(outcomes: list[bool], base: int) -> None:
    made, least = Strangers(base=base), max(1, base // LEAST)
    num_returned = num_lost = 0
    fill(made)
    for returns in outcomes:
        rests = made.may_hold == least
        if returns:
            first_returns(made)
        else:
            made.lost()
            made.count(-1)
        num_returned += returns
        num_lost += not returns and not rests
        assert least <= made.may_hold <= base + min(num_returned, USED * made.in_flight)
        assert LOST * num_lost <= num_returned + base
        if made.in_flight < made.may_hold:
            fill(made)


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
