"""Nodes' totals and ranks over the whole run. The hub tells each connected node its own figures."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Connection, func, select

from echo_hub.store.board import entries_of, ranked
from echo_hub.store.tables import checking, credit, tallies
from echo_hub.store.tallies import ANSWERED, EVALUATED, TRAINED, USEFUL

KEYS_A_QUERY: Final = 10_000
"""Number of nodes in one query. Every query ranks all nodes, so one large query is cheaper than several small ones. Few
hubs have more connected nodes, and both databases allow three times as many parameters in one statement.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Credit of one node. Fields are numbers of rollouts unless their names say otherwise."""

    trained: int = 0
    trained_tokens: int = 0
    evaluated: int = 0
    answered: int = 0
    answered_tokens: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    others_checked: int = 0
    share: float = 0.0
    """The node's share of all rollouts that were trained on, evaluated or delivered to tenants."""
    rank: int | None = None
    """Rank on the leaderboard; None for a node without useful rollouts."""
    num_ranked: int = 0


def read_credits(connection: Connection, node_ids: Collection[str]) -> dict[str, Credit]:
    """Return the credit of each of these nodes.

    Ranks are the leaderboard's: by useful rollouts, then by name and id. The database computes them, so
    no rows of other nodes are read.
    """
    board, keys = ranked(connection, "node"), sorted(node_ids)
    ranks = select(board.c.holder, board.c.rollouts, board.c.rank).where(board.c.rollouts > 0).subquery()
    num_ranked, total = connection.execute(select(func.count(), func.sum(ranks.c.rollouts)).select_from(ranks)).one()
    credits = {}
    for start in range(0, len(keys), KEYS_A_QUERY):
        part = keys[start : start + KEYS_A_QUERY]
        entries = entries_of(connection, part)
        shown = select(ranks.c.holder, ranks.c.rank).where(ranks.c.holder.in_(set(entries.values())))
        rank_of = {row.holder: int(row.rank) for row in connection.execute(shown)}
        own = select(credit.c.holder, credit.c.rollouts).where(credit.c.holder.in_(part), credit.c.rollouts > 0)
        rollouts_of = {row.holder: int(row.rollouts) for row in connection.execute(own)}
        by_others = select(checking.c.node_id, checking.c.rollouts).where(checking.c.node_id.in_(part))
        checked = {row.node_id: int(row.rollouts) for row in connection.execute(by_others)}
        final: dict[str, dict[str, Any]] = {}
        for row in connection.execute(_OUTCOMES.where(tallies.c.node_id.in_(part))):
            final.setdefault(row.node_id, {})[row.outcome] = row
        for node_id in part:
            of_node, rollouts = final.get(node_id, {}), rollouts_of.get(node_id, 0)
            trained, evaluated, answered = of_node.get(TRAINED), of_node.get(EVALUATED), of_node.get(ANSWERED)
            credits[node_id] = Credit(
                trained=trained.rollouts if trained else 0,
                trained_tokens=trained.tokens if trained else 0,
                evaluated=evaluated.rollouts if evaluated else 0,
                answered=answered.rollouts if answered else 0,
                answered_tokens=answered.tokens if answered else 0,
                dropped={
                    outcome: row.rollouts
                    for outcome, row in sorted(of_node.items())
                    if outcome not in USEFUL and row.rollouts
                },
                others_checked=checked.get(node_id, 0),
                share=rollouts / int(total) if rollouts else 0.0,
                rank=rank_of.get(entries[node_id]) if rollouts else None,
                num_ranked=num_ranked,
            )
    return credits


_OUTCOMES: Final = select(tallies.c.node_id, tallies.c.outcome, tallies.c.rollouts, tallies.c.tokens)
