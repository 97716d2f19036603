from __future__ import annotations

import pytest

from echo_hub.core.trust import standing as module
from echo_hub.core.trust.evidence import NO_EVIDENCE
from echo_hub.core.trust.judging import NOTHING, Alternative
from echo_hub.core.trust.numerics import Numerics, NumericsClass
from echo_hub.core.trust.standing import WINDOW, Standing, StandingRow, Standings, StandingState
from tests.echo_hub.core.trust.simulated import evidence

ROW = StandingRow(
    node_id="a",
    state=StandingState.PROVEN,
    numerics=NumericsClass("torch", "f32", "cpu"),
    num_verified=12,
    sums=(1.5, *NOTHING[1:]),
    proof=-9.5,
    shown=evidence(1),
    num_checked=20,
    num_failed=1,
    checked_at=1_000.0,
    since=500.0,
)


def test_a_standing_survives_being_stored() -> None:
    standing = Standing.of(ROW)
    assert standing.row == ROW and standing.is_proven and not standing.is_quarantined
    assert standing.share == 1.0, "until the hub sets another share"


def test_a_restarted_standing_has_no_evidence_but_keeps_its_sums() -> None:
    standing = Standing.of(ROW)
    standing.begin_again(StandingState.SUSPECT, "why", 700.0)
    assert (standing.num_verified, standing.proof, standing.share) == (0, 0.0, 1.0)
    assert (standing.state, standing.reason, standing.since) == ("suspect", "why", 700.0)
    assert standing.sums == ROW.sums and standing.num_checked == 20
    standing.begin_again(StandingState.SUSPECT, "again", 900.0)
    assert (standing.reason, standing.since) == ("again", 700.0)


def test_checks_and_rewards_each_change_their_own_sums() -> None:
    standing, all_new = Standing("a"), (2.0,) * len(NOTHING)
    standing.weigh(all_new, evidence(1))
    assert standing.sums == (*all_new[: Alternative.SHOPPED], *NOTHING[Alternative.SHOPPED :])
    assert [grounds.num_rollouts for grounds in standing.grounds] == [1] * 9 + [0] * 3
    standing.weigh_rewards((3.0,) * len(NOTHING), evidence(2).counts)
    assert standing.sums == (*all_new[: Alternative.SHOPPED], 3.0, 3.0, 3.0)
    assert [grounds.shown.num_tokens for grounds in standing.grounds] == [1] * 9 + [2] * 3
    standing.acquit()
    assert standing.sums == NOTHING and {grounds.num_rollouts for grounds in standing.grounds} == {0}


def test_only_the_last_tokens_are_kept() -> None:
    standing, part = Standing("a"), evidence(WINDOW // 4)
    held = []
    for _ in range(12):
        standing.show(part)
        held.append(standing.recent.num_tokens * 4 // WINDOW)
    assert held == [1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7, 4]
    assert Standing("b").recent is NO_EVIDENCE


def test_a_stored_standing_has_no_recent_evidence() -> None:
    standing = Standing.of(ROW)
    standing.show(evidence(5))
    assert standing.row == ROW and Standing.of(standing.row).recent == NO_EVIDENCE


Q4 = NumericsClass("llama_cpp", "q4_k_m", "cpu")


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Standings:
    monkeypatch.setattr(module, "REMEMBERED", 2)
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
