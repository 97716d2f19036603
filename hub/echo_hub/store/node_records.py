"""One node's full record for its page: totals, outcomes, checks and trust decisions. Reads only. The number of rows
read is limited, so a long run costs no more time than a new one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, select

from echo_hub.core.trust.evidence import CLAIM_EDGES, DRAW_EDGES, NO_EVIDENCE
from echo_hub.store.browsing import newest_of_node
from echo_hub.store.reports import read_leaderboard
from echo_hub.store.standings import STORED
from echo_hub.store.tables import nodes, tallies, trust, trust_log
from echo_shared.records.node import CheckEvidence, NodeOutcome, NodeRecord, TokenClass, TrustDecision

DECISIONS: Final = 50
ROLLOUTS: Final = 10
"""Number of newest rollouts shown, and of newest checked rollouts."""


def read_node_record(connection: Connection, node_id: str) -> NodeRecord | None:
    """Return a node's record; None for a node that never joined and never held a lease."""
    found = read_leaderboard(connection, only=(node_id,))
    if not found:
        return None
    newest, checked = newest_of_node(connection, node_id, ROLLOUTS)
    shown = connection.scalar(select(trust.c.shown).where(trust.c.node_id == node_id))
    return NodeRecord(
        totals=found[0],
        public_key=connection.scalar(select(nodes.c.public_key).where(nodes.c.node_id == node_id)) or "",
        outcomes=_outcomes(connection, node_id),
        shown=_evidence(shown),
        decisions=_decisions(connection, node_id),
        checked=checked,
        rollouts=newest,
    )


def _outcomes(connection: Connection, node_id: str) -> tuple[NodeOutcome, ...]:
    of_node = select(tallies).where(tallies.c.node_id == node_id)
    rows = connection.execute(of_node.order_by(tallies.c.rollouts.desc(), tallies.c.outcome))
    return tuple(
        NodeOutcome(outcome=row.outcome, rollouts=row.rollouts, received=row.received, tokens=row.tokens)
        for row in rows
    )


def _decisions(connection: Connection, node_id: str) -> tuple[TrustDecision, ...]:
    of_node = select(trust_log).where(trust_log.c.node_id == node_id)
    rows = connection.execute(of_node.order_by(trust_log.c.number.desc()).limit(DECISIONS))
    return tuple(
        TrustDecision(
            number=row.number,
            decided_at=row.decided_at,
            decision=row.decision,
            reason=row.reason,
            rollout_id=row.rollout_id,
            evidence=_evidence(row.evidence),
        )
        for row in rows
    )


def _evidence(stored: Mapping[str, Any] | None) -> CheckEvidence | None:
    """Return the stored evidence; None if there is none, or another release's form."""
    if not stored or set(stored) != set(STORED):
        return None
    draws, claims = stored["draws"], stored["claims"]
    if (len(draws), len(claims)) != (len(NO_EVIDENCE.draws), len(NO_EVIDENCE.claims)) or not sum(draws):
        return None
    return CheckEvidence(
        draws=_classes(DRAW_EDGES, draws),
        claims=_classes(CLAIM_EDGES, claims),
        mismatch_kl=stored["mismatch_kl"] / sum(draws),
        bias=stored["bias"] / sum(claims) if sum(claims) else None,
    )


def _classes(edges: Sequence[float], counts: Sequence[int]) -> tuple[TokenClass, ...]:
    return tuple(TokenClass(edge=edge, tokens=count) for edge, count in zip((*edges, None), counts, strict=True))
