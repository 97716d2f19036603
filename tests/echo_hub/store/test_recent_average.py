from __future__ import annotations

import random
from math import log

import pytest

from echo_hub.store.recent_average import HALF_LIFE_S, added, average

DAY = 86_400.0
START = 1.79e9


def test_work_every_day_comes_to_that_work_a_day() -> None:
    recent = None
    for hour in range(24 * 7 * 12):
        recent = added(recent, 1_000, START + hour * 3_600)
    assert average(recent, START + 7 * 12 * DAY) == pytest.approx(24_000, rel=0.01)


def test_an_idle_nodes_average_halves_in_a_week() -> None:
    recent = added(None, 5_000, START)
    assert average(recent, START) == pytest.approx(5_000 * log(2) / 7)
    assert average(recent, START + HALF_LIFE_S) == pytest.approx(average(recent, START) / 2)
    assert average(recent, START + 10_000 * HALF_LIFE_S) == 0.0


def test_neither_order_nor_cut_of_the_work_matters() -> None:
    work = [(tokens, START + tokens * 977.0 % (30 * DAY)) for tokens in range(1, 200)]
    shuffled = [*work]
    random.Random(3).shuffle(shuffled)
    recent = again = None
    for tokens, at in work:
        recent = added(recent, tokens, at)
    for tokens, at in shuffled:
        again = added(added(again, tokens // 2, at), tokens - tokens // 2, at)
    exact = sum(tokens * log(2) / 7 * 2 ** ((at - START - 30 * DAY) / HALF_LIFE_S) for tokens, at in work)
    assert average(recent, START + 30 * DAY) == pytest.approx(exact, rel=1e-9)
    assert average(again, START + 30 * DAY) == pytest.approx(exact, rel=1e-9)


def test_an_order_by_what_is_stored_holds_at_any_time() -> None:
    one, other = added(None, 900, START), added(None, 500, START + HALF_LIFE_S)
    assert one is not None and other is not None and other > one
    for later in (1.0, 3.0, 50.0):
        at = START + later * HALF_LIFE_S
        assert average(other, at) > average(one, at)


def test_nothing_comes_of_nothing() -> None:
    assert added(None, 0, START) is None and average(None, START) == 0.0
    assert added(4.0, 0, START) == 4.0
