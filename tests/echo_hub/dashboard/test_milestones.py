from __future__ import annotations

from dataclasses import replace

from echo_hub.dashboard.milestones import milestones
from echo_shared.records.credit import CreditDay, CreditStanding

STANDING = CreditStanding(
    kind="node",
    rank=1,
    name="n",
    rollouts=12,
    tokens=12_000,
    share=1.0,
    recent=0.0,
    steps=3,
    streak_days=2,
    longest_streak=8,
    first_day=10,
    last_day=12,
)
DAYS = (CreditDay(day=10, rollouts=9, tokens=9_000), CreditDay(day=12, rollouts=3, tokens=3_000))


def test_milestones_are_reached_on_a_day_and_the_next_is_ahead() -> None:
    found = {one.text: (one.reached, one.day) for one in milestones(STANDING, DAYS)}
    assert found == {
        "1 rollout": (True, 10),
        "10 rollouts": (True, 12),
        "100 rollouts": (False, None),
        "10,000 tokens": (True, 12),
        "100,000 tokens": (False, None),
        "10 steps": (False, None),
        "3 days in a row": (True, None),
        "7 days in a row": (True, None),
        "30 days in a row": (False, None),
    }


def test_where_days_are_missing_no_day_is_made_up() -> None:
    assert all(one.day is None for one in milestones(replace(STANDING, rollouts=20), DAYS))
