"""Nodes' totals and ranks over the whole run. The hub tells each connected node its own figures."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Connection, func, literal, select

from echo_hub.store.board import ranked
from echo_hub.store.credit import OWNER
from echo_hub.store.tables import checking, credit, nodes, tallies
from echo_hub.store.tallies import EVALUATED, TRAINED

KEYS_A_QUERY: Final = 10_000
"""Nodes in one query. Every query ranks all nodes, so one large query is cheaper than several small ones. Few hubs have
more connected nodes, and both databases allow three times as many parameters in one statement."""
_USEFUL: Final = (TRAINED, EVALUATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Credit of one node. Counts are numbers of rollouts unless their names say otherwise."""

    trained: int = 0
    trained_tokens: int = 0
    evaluated: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    others_checked: int = 0
    share: float = 0.0
    """The node's share of all rollouts that were trained on or evaluated."""
    rank: int | None = None
    """Rank on the leaderboard; None before the node's first trained or evaluated rollout."""
    num_ranked: int = 0


def read_credits(connection: Connection, node_ids: Collection[str]) -> dict[str, Credit]:
    """Return the credit of each of these nodes.

    Ranks are the leaderboard's: by trained or evaluated rollouts, then by name and id. The database computes them, so
    no rows of other nodes are read.
    """
    board, keys = ranked(connection, "node"), sorted(node_ids)
    ranks = select(board.c.holder, board.c.rollouts, board.c.rank).where(board.c.rollouts > 0).subquery()
    # An owner may have one leaderboard entry, which replaces the entries of its nodes. Then use the owner's rank.
    of_owner = ranks.c.holder == literal(OWNER).concat(nodes.c.owner_key)
    own = select(credit.c.holder.label("node_id"), credit.c.rollouts, ranks.c.rank)
    places_of = own.join(nodes, nodes.c.node_id == credit.c.holder, isouter=True).join(
        ranks, (ranks.c.holder == credit.c.holder) | of_owner
    )
    num_ranked, total = connection.execute(select(func.count(), func.sum(ranks.c.rollouts)).select_from(ranks)).one()
    credits = {}
    for start in range(0, len(keys), KEYS_A_QUERY):
        part = keys[start : start + KEYS_A_QUERY]
        places = {row.node_id: row for row in connection.execute(places_of.where(credit.c.holder.in_(part)))}
        by_others = select(checking.c.node_id, checking.c.rollouts).where(checking.c.node_id.in_(part))
        checked = {row.node_id: int(row.rollouts) for row in connection.execute(by_others)}
        final: dict[str, dict[str, Any]] = {}
        for row in connection.execute(_OUTCOMES.where(tallies.c.node_id.in_(part))):
            final.setdefault(row.node_id, {})[row.outcome] = row
        for node_id in part:
            of_node, place = final.get(node_id, {}), places.get(node_id)
            trained, evaluated = of_node.get(TRAINED), of_node.get(EVALUATED)
            credits[node_id] = Credit(
                trained=trained.rollouts if trained else 0,
                trained_tokens=trained.tokens if trained else 0,
                evaluated=evaluated.rollouts if evaluated else 0,
                dropped={
                    outcome: row.rollouts
                    for outcome, row in sorted(of_node.items())
                    if outcome not in _USEFUL and row.rollouts
                },
                others_checked=checked.get(node_id, 0),
                share=int(place.rollouts) / int(total) if place else 0.0,
                rank=int(place.rank) if place else None,
                num_ranked=num_ranked,
            )
    return credits


_OUTCOMES: Final = select(tallies.c.node_id, tallies.c.outcome, tallies.c.rollouts, tallies.c.tokens)
