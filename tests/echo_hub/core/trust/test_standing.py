from __future__ import annotations

from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.numerics import NumericsClass
from echo_hub.core.trust.standing import Standing, StandingRow, StandingState

ROW = StandingRow(
    node_id="a",
    state=StandingState.PROVEN,
    numerics=NumericsClass("torch", "f32", "cpu"),
    num_verified=12,
    sums=(0.0, 1.5, 0.0, 0.0, 0.0, 0.25),
    proof=-9.5,
    shown=Evidence.of([0.0], [0.0]),
    num_checked=20,
    num_failed=1,
    checked_at=1_000.0,
    since=500.0,
)


def test_a_standing_survives_being_stored() -> None:
    standing = Standing.of(ROW)
    assert standing.row == ROW and standing.is_proven and not standing.is_quarantined
    assert standing.share == 1.0, "until its keeper says otherwise"


def test_who_begins_again_has_shown_nothing_but_keeps_what_speaks_against_it() -> None:
    standing = Standing.of(ROW)
    standing.begin_again(StandingState.SUSPECT, "why", 700.0)
    assert (standing.num_verified, standing.proof, standing.share) == (0, 0.0, 1.0)
    assert (standing.state, standing.reason, standing.since) == ("suspect", "why", 700.0)
    assert standing.sums == ROW.sums and standing.num_checked == 20
    standing.begin_again(StandingState.SUSPECT, "again", 900.0)
    assert (standing.reason, standing.since) == ("again", 700.0)
