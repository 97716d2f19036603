"""The leaderboard: who lent a machine whose work counted."""

from __future__ import annotations

from echo_hub.dashboard.model import LeaderboardRow, public_id
from echo_shared.books import NodeTotals


def board_row(rank: int, row: NodeTotals) -> LeaderboardRow:
    """What the hub suspects of whom, and how near to proven anybody is, is the operator's alone to see."""
    return LeaderboardRow(
        rank=rank,
        node=public_id(row.node_id),
        name=row.name,
        trained_rollouts=row.trained_rollouts,
        trained_tokens=row.trained_tokens,
        evaluated_rollouts=row.evaluated_rollouts,
        share=row.share,
        others_checked=row.others_checked,
        others_checked_tokens=row.others_checked_tokens,
        last_seen=row.last_seen,
    )
