from datetime import date, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.core.traffic import DAYS_KEPT, Amount, Caps, Traffic, TrafficByDate

DATES = st.dates(min_value=date(2026, 1, 1), max_value=date(2027, 12, 31))


def test_days_and_months_by_hand() -> None:
    ledger = TrafficByDate({date(2026, 1, 30): Amount(1, 10)})
    ledger.add(Amount(2, 20), date(2026, 1, 31))
    ledger.add(Amount(4, 40), date(2026, 1, 31))
    assert ledger.now(date(2026, 1, 31)) == Traffic(day=Amount(6, 60), month=Amount(7, 70))
    assert ledger.now(date(2026, 2, 1)) == Traffic(day=Amount(), month=Amount()), "a month has ended at midnight"
    ledger.add(Amount(1, 1), date(2027, 1, 31))
    assert ledger.now(date(2027, 1, 31)).month == Amount(1, 1), "January of another year"


def test_a_clock_set_back_continues_with_the_shown_day() -> None:
    ledger = TrafficByDate({})
    ledger.add(Amount(5, 0), date(2026, 3, 10))
    ledger.add(Amount(100, 0), date(2026, 3, 20))  # Traffic recorded while the machine's clock was ten days ahead.
    assert ledger.now(date(2026, 3, 10)) == Traffic(day=Amount(5, 0), month=Amount(5, 0))
    ledger.add(Amount(1, 0), date(2026, 3, 10))
    assert ledger.now(date(2026, 3, 10)).day == Amount(6, 0)
    assert ledger.now(date(2026, 3, 21)).month == Amount(106, 0), "nothing that was counted is lost"


@given(st.lists(st.tuples(DATES, st.integers(0, 2**40), st.integers(0, 2**40)), max_size=40))
def test_no_byte_is_lost_or_counted_twice_under_any_clock_change(moves: list[tuple[date, int, int]]) -> None:
    ledger = TrafficByDate({})
    for day, sent, received in moves:
        ledger.add(Amount(sent, received), day)
    total = sum((amount.sent + amount.received for amount in ledger.days.values()), 0)
    assert total == sum(sent + received for _, sent, received in moves)
    again = TrafficByDate(ledger.days)
    assert all(again.now(day) == ledger.now(day) for day, _, _ in moves)


def test_the_kept_history_is_bounded_and_covers_a_month() -> None:
    ledger, begin = TrafficByDate({}), date(2026, 1, 1)
    for number in range(200):
        ledger.add(Amount(1, 0), begin + timedelta(days=number))
    assert len(ledger.days) == DAYS_KEPT and max(ledger.days) == begin + timedelta(days=199)


@pytest.mark.parametrize(
    ("today", "end"),
    [
        (date(2026, 1, 31), "on 1 February"),
        (date(2026, 2, 28), "on 1 March"),
        (date(2028, 2, 29), "on 1 March"),
        (date(2026, 12, 1), "on 1 January"),
        (date(2026, 3, 29), "on 1 April"),  # In much of Europe this day has 23 hours (daylight saving time).
    ],
)
def test_a_month_s_cap_says_when_it_ends(today: date, end: str) -> None:
    caps = Caps(sent_a_day=10, received_a_month=1_000_000_000)
    traffic = Traffic(day=Amount(10, 0), month=Amount(10, 1_234_000_000))
    assert caps.reached(traffic, today) == (
        f"1.23 GB were downloaded this month, of 1.00 that you have set: the node resumes {end}."
    )


def test_caps_are_reached_one_by_one() -> None:
    day, month = Amount(5, 6), Amount(7, 8)
    traffic = Traffic(day=day, month=month)
    assert Caps().reached(traffic, date(2026, 1, 1)) is None
    assert (
        Caps(sent_a_day=6, received_a_day=7, sent_a_month=8, received_a_month=9).reached(traffic, date(2026, 1, 1))
        is None
    )
    for caps, verb in (
        (Caps(sent_a_day=5), "uploaded this day"),
        (Caps(received_a_day=6), "downloaded this day"),
        (Caps(sent_a_month=7), "uploaded this month"),
        (Caps(received_a_month=8), "downloaded this month"),
    ):
        assert verb in (caps.reached(traffic, date(2026, 1, 1)) or "")
