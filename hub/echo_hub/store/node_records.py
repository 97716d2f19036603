"""One node's full record for its page, and its contribution for its certificate. Reads only. The number of rows read is
limited, so the time does not grow with the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Table, select

from echo_hub.core.trust.evidence import CLAIM_EDGES, DRAW_EDGES, NO_EVIDENCE
from echo_hub.store.browsing import newest_of_node
from echo_hub.store.reports import read_leaderboard
from echo_hub.store.standings import STORED
from echo_hub.store.tables import checking, nodes, tallies, trust, trust_log
from echo_hub.store.tallies import ANSWERED, EVALUATED, TRAINED
from echo_shared.records.contribution import Contribution, moment
from echo_shared.records.node import CheckEvidence, NodeOutcome, NodeRecord, TokenClass, TrustDecision

DECISIONS: Final = 50
ROLLOUTS: Final = 10
"""Number of the node's newest rollouts on its page, and of its newest checked rollouts."""


def read_node_record(connection: Connection, node_id: str) -> NodeRecord | None:
    """Return a node's record; None if the node neither joined the run nor held a lease."""
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
    """Return the stored evidence. Return None without stored evidence, or if another release stored the evidence in
    another form.
    """
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


def read_contribution(
    connection: Connection, node_id: str, *, run_id: str, run_name: str, hub_key: bytes, now: float
) -> Contribution | None:
    node = _row(connection, nodes, node_id)
    if not node:
        return None
    rows = connection.execute(select(tallies).where(tallies.c.node_id == node_id)).mappings()
    final: dict[str, Mapping[str, Any]] = {row["outcome"]: dict(row) for row in rows}
    trained, evaluated, answered = (final.get(outcome, {}) for outcome in (TRAINED, EVALUATED, ANSWERED))
    judged, checked = _row(connection, trust, node_id), _row(connection, checking, node_id)
    num_failed = judged.get("num_failed", 0)
    return Contribution(
        run_id=run_id,
        run_name=run_name,
        hub_key=hub_key.hex(),
        node_id=node_id,
        node_key=node["public_key"],
        node_name=node["name"],
        first_seen=moment(node["first_seen"]),
        last_seen=moment(node["last_seen"]),
        issued_at=moment(now),
        trained_rollouts=trained.get("rollouts", 0),
        trained_tokens=trained.get("tokens", 0),
        evaluated_rollouts=evaluated.get("rollouts", 0),
        evaluated_tokens=evaluated.get("tokens", 0),
        answered_rollouts=answered.get("rollouts", 0),
        answered_tokens=answered.get("tokens", 0),
        checks_passed=judged.get("num_checked", 0) - num_failed,
        checks_failed=num_failed,
        others_checked_rollouts=checked.get("rollouts", 0),
        others_checked_tokens=checked.get("tokens", 0),
    )


def _row(connection: Connection, table: Table, node_id: str) -> Mapping[str, Any]:
    found = connection.execute(select(table).where(table.c.node_id == node_id)).mappings().one_or_none()
    return {} if found is None else dict(found)
