from __future__ import annotations

import pytest

from echo_hub.core.trust import standings
from echo_hub.core.trust.numerics import Numerics, NumericsClass
from echo_hub.core.trust.standing import StandingRow, StandingState
from echo_hub.core.trust.standings import Standings

Q4 = NumericsClass("llama_cpp", "q4_k_m", "cpu")


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Standings:
    """Return standings that remember at most two disconnected nodes."""
    monkeypatch.setattr(standings, "REMEMBERED", 2)
    return Standings(Numerics())


def come_and_go(books: Standings, *names: str) -> None:
    for name in names:
        books.connected(name, ()).numerics = Q4
        books.disconnected(name)


def test_fresh_keys_take_no_more_room_than_the_last_ones(books: Standings) -> None:
    come_and_go(books, *(f"key {number}" for number in range(100)))
    assert len(books) == 2
    assert books.of("key 99").numerics == Q4 and books.of("key 0").numerics != Q4


def test_a_returned_node_is_kept_while_it_is_connected(books: Standings) -> None:
    come_and_go(books, "a", "b")
    books.connected("a", ())
    come_and_go(books, "c", "d", "e")
    assert books.of("a").numerics == Q4
    assert books.get("b") is None


@pytest.mark.parametrize("shown", [{"num_checked": 1}, {"hints_from": 4}, {"state": StandingState.SUSPECT}])
def test_a_node_with_any_evidence_is_kept(books: Standings, shown: dict[str, object]) -> None:
    standing = books.connected("known", ())
    for name, value in shown.items():
        setattr(standing, name, value)
    books.disconnected("known")
    come_and_go(books, "a", "b", "c")
    assert books.get("known") is standing


def test_a_node_checked_after_it_left_is_kept(books: Standings) -> None:
    come_and_go(books, "a")
    books.of("a").num_checked = 1
    come_and_go(books, "b", "c", "d")
    assert books.get("a") is not None


def test_standings_are_restored_after_a_restart(books: Standings) -> None:
    row = StandingRow(node_id="a", numerics=Q4, state=StandingState.PROVEN, num_checked=7, num_verified=5, since=3.0)
    assert books.restore(row).row == row
    come_and_go(books, "b", "c", "d")
    assert books.get("a") is not None


def test_a_nodes_kin_comes_from_its_last_connection(books: Standings) -> None:
    books.connected("a", ("1.2.3.0/24", "invite 1"))
    assert books.connected("a", ("5.6.7.0/24", "")).kin == {"5.6.7.0/24"}
