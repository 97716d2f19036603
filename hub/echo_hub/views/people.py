"""The leaderboard: who lent a machine whose work counted."""

from __future__ import annotations

from collections.abc import Sequence

from echo_hub.dashboard.model import LeaderboardRow
from echo_shared.books import NodeTotals


def ranked(totals: Sequence[NodeTotals]) -> tuple[LeaderboardRow, ...]:
    """The nodes that have a share, in the order of the books: largest share first."""
    return tuple(
        LeaderboardRow(rank=rank, totals=row)
        for rank, row in enumerate((row for row in totals if row.share > 0), start=1)
    )
