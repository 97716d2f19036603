from __future__ import annotations

from typing import Any


async def test_ranks_count_only_those_who_have_trained_rollouts(hub: Any) -> None:
    await hub.join("idle", capacity=0)
    await hub.join("a", capacity=2)
    await hub.join("b", capacity=100)
    await hub.train_to_the_end()
    rows = await hub.pages.leaderboard()
    assert [row.rank for row in rows] == list(range(1, len(rows) + 1))
    assert "idle" not in {row.totals.node_id for row in rows}
    assert sum(row.totals.trained_rollouts for row in rows) == 8
    assert rows[0].totals.trained_rollouts >= rows[-1].totals.trained_rollouts
    assert {node.totals.node_id for node in await hub.pages.nodes()} == {"idle", "a", "b"}
