from __future__ import annotations

from echo_hub.dashboard.responses import jsonable
from echo_shared.records.credit import BOARD_ORDERS, CreditStanding, WorkKinds


def test_a_standing_adds_up_over_runs_and_its_work_is_flat_in_json() -> None:
    standing = CreditStanding(
        kind="node",
        rank=1,
        name="n",
        rollouts=2,
        tokens=30,
        share=1.0,
        recent=0.0,
        steps=1,
        streak_days=0,
        longest_streak=1,
        first_day=None,
        last_day=None,
        elsewhere_rollouts=5,
        elsewhere_tokens=70,
        work=WorkKinds(trained_rollouts=2),
    )
    assert standing.all_rollouts == 7
    fields = jsonable(standing)
    assert fields["trained_rollouts"] == 2 and "work" not in fields


def test_the_first_order_is_the_default() -> None:
    assert BOARD_ORDERS[0] == "rank"
