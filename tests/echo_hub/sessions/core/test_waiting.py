"""Slots of several tasks: the limits of full environments, and repeated tries to reach environments that do not
answer.
"""

from __future__ import annotations

from echo_hub.sessions.core.waiting import FIRST_TRY_S, LIMIT_HOLDS_S, Slots


def test_a_task_without_answer_is_tried_by_one_session_at_a_time() -> None:
    slots = Slots(["a", "b"], most=8)
    slots.taken("a", 1)
    slots.is_away("a", "refused", 0.0, 0.0)
    slots.freed("a", 1)
    assert not slots.may_open("a", FIRST_TRY_S / 2) and slots.may_open("b", 0.0)
    assert slots.may_open("a", FIRST_TRY_S)
    slots.taken("a", 2)
    assert not slots.may_open("a", FIRST_TRY_S)
    slots.is_away("a", "refused", FIRST_TRY_S, 0.0)
    slots.freed("a", 2)
    assert slots.next_try_at(["a", "b"], FIRST_TRY_S) == 3 * FIRST_TRY_S
    assert slots.absence == "a is away: refused"
    slots.taken("a", 3)
    slots.opened("a", 3)
    assert slots.absence == "" and slots.may_open("a", FIRST_TRY_S)


def test_sessions_that_fail_in_one_try_do_not_delay_the_next() -> None:
    slots = Slots([""], most=64)
    for session in range(64):
        slots.taken("", session)
        slots.is_away("", "down", 0.0, 0.0)
    at = slots.next_try_at([""], 0.0)
    assert at is not None and at <= FIRST_TRY_S


def test_only_tasks_whose_environment_is_there_have_slots() -> None:
    slots = Slots(["a"], most=8)
    assert slots.total == 8
    slots.is_away("a", "refused", 0.0, 0.0)
    assert slots.total == 0


def test_the_limit_of_an_environment_is_tried_again_after_some_time() -> None:
    slots = Slots(["a"], most=8)
    for session in (1, 2):
        slots.taken("a", session)
        slots.opened("a", session)
    slots.taken("a", 3)
    slots.is_full("a", 3, None, 0.0, 0.0)
    slots.freed("a", 3)
    assert slots.total == 2 and not slots.may_open("a", 1.0)
    assert slots.may_open("a", LIMIT_HOLDS_S)
    slots.taken("a", 4)
    assert not slots.may_open("a", LIMIT_HOLDS_S), "one session tries, not all that wait"
    slots.opened("a", 4)
    assert slots.total == 3 and slots.may_open("a", LIMIT_HOLDS_S)


def test_an_environment_whose_slots_others_hold_is_not_asked_at_once_again() -> None:
    slots = Slots(["a"], most=8)
    slots.taken("a", 1)
    slots.is_full("a", 1, 4, 0.0, 0.0)
    slots.freed("a", 1)
    assert slots.total == 4 and not slots.may_open("a", 0.0) and slots.may_open("a", FIRST_TRY_S)
