from __future__ import annotations

from typing import Any

from echo_hub.views.people import board_row
from echo_shared.books import NodeTotals


async def test_ranks_count_only_those_who_have_trained_rollouts(hub: Any) -> None:
    await hub.join("idle", capacity=0)
    await hub.join("a", capacity=2)
    await hub.join("b", capacity=100)
    await hub.train_to_the_end()
    rows = await hub.pages.leaderboard()
    assert [row.rank for row in rows] == list(range(1, len(rows) + 1))
    assert "idle" not in {row.node for row in rows}
    assert sum(row.trained_rollouts for row in rows) == 8
    assert rows[0].trained_rollouts >= rows[-1].trained_rollouts
    assert {node.totals.node_id for node in await hub.pages.nodes()} == {"idle", "a", "b"}


def test_the_public_does_not_see_whom_the_hub_suspects() -> None:
    about = {"node_id": "a", "name": "a", "backend": "torch", "device": "cpu", "first_seen": 1.0, "last_seen": 2.0}
    known = NodeTotals(**about, share=1.0, received=5)
    suspected = NodeTotals(
        **about,
        share=1.0,
        received=5,
        standing="quarantined",
        standing_reason="forged",
        standing_since=3.0,
        verified_in_a_row=4,
        checks=9,
        failed_checks=1,
        last_checked=2.5,
    )
    assert board_row(1, suspected) == board_row(1, known)
