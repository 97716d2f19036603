from __future__ import annotations

import pytest

from echo_hub.net import address_rate
from echo_hub.net.address_rate import BURST_S, AddressRate


def taken(rate: AddressRate, place: str, tries: int, *, now: float) -> int:
    return sum(rate.take(place, now=now) for _ in range(tries))


def test_an_address_may_send_a_burst_and_then_at_its_rate() -> None:
    rate = AddressRate(in_all=1_000.0, of_one=10.0, now=5.0)
    assert taken(rate, "a", 100, now=5.0) == 10 * BURST_S
    assert taken(rate, "a", 100, now=6.0) == 10
    assert taken(rate, "a", 100, now=6.0625) == 0
    assert taken(rate, "a", 100, now=6.125) == 1
    assert taken(rate, "a", 100, now=1_000.0) == 10 * BURST_S, "unused rate is not saved up beyond the burst"


def test_one_address_does_not_use_up_the_rate_of_others() -> None:
    rate = AddressRate(in_all=20.0, of_one=10.0, now=0.0)
    assert taken(rate, "a", 10_000, now=0.0) == 40
    assert taken(rate, "b", 10_000, now=0.0) == 40
    assert taken(rate, "c", 1, now=0.0) == 0, "all addresses together have a limit"
    assert taken(rate, "c", 10_000, now=1.0) == 20
    assert taken(rate, "b", 10_000, now=2.0) == 20


def test_a_returned_unit_does_not_count() -> None:
    rate = AddressRate(in_all=10.0, of_one=10.0, now=0.0)
    for _ in range(1_000):
        assert rate.take("a", now=0.0)
        rate.give_back("a")


def test_the_address_idle_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_rate, "MOST_PLACES", 2)
    rate = AddressRate(in_all=1_000.0, of_one=1.0, now=0.0)
    assert [taken(rate, place, 9, now=0.0) for place in ("a", "b", "a", "c")] == [4, 4, 0, 4]
    assert [taken(rate, place, 9, now=0.0) for place in ("a", "b")] == [0, 4]
