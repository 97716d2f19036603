"""Nodes' trust standings, and the log of trust decisions, in the store."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import Connection, bindparam, insert, select, update

from echo_hub.core.accounting.effects import TrustDecided
from echo_hub.core.trust.evidence import CLAIM_EDGES, DRAW_EDGES, NO_EVIDENCE, Evidence
from echo_hub.core.trust.judging import NOTHING, Alternative, Sums
from echo_hub.core.trust.numerics import CoarseClass, NumericsClass
from echo_hub.core.trust.standing import Decision, StandingRow, StandingState
from echo_hub.store.bulk import among
from echo_hub.store.database import write_meta
from echo_hub.store.tables import run_meta, trust, trust_log

COARSE_CLASSES: Final = "coarse_classes"
"""Key in `run_meta` under which the coarse numerics classes are stored: kinds of engine that nodes have shown to round
more coarsely than measured or assumed.
"""
STORED: Final = ("draws", "claims", "mismatch_kl", "bias")
"""Fields of `Evidence` that the database stores, as JSON."""


def write_standings(connection: Connection, rows: Sequence[StandingRow]) -> None:
    """Store the newest standing of each node. No upsert is needed: only one thread of the hub inserts such rows."""
    newest = {row.node_id: row for row in rows}
    known = set(connection.scalars(select(trust.c.node_id).where(among(connection, trust.c.node_id, newest))))
    fresh = [_columns(row) for row in newest.values() if row.node_id not in known]
    if fresh:
        connection.execute(insert(trust), fresh)
    changed = [_columns(row) for row in newest.values() if row.node_id in known]
    if changed:
        names = [name for name in changed[0] if name != "node_id"]
        statement = update(trust).where(trust.c.node_id == bindparam("key"))
        statement = statement.values({name: bindparam(f"new_{name}") for name in names})
        connection.execute(
            statement, [{"key": row["node_id"], **{f"new_{name}": row[name] for name in names}} for row in changed]
        )


def write_decisions(connection: Connection, decisions: Sequence[TrustDecided]) -> None:
    """Add decisions to the log. A decision to pardon a node also clears the operator's request for it."""
    connection.execute(
        insert(trust_log),
        [
            {
                "decided_at": one.decided_at,
                "node_id": one.node_id,
                "decision": one.decision,
                "reason": one.reason,
                "rollout_id": one.rollout_id,
                "evidence": None if one.evidence is None else _as_json(one.evidence),
            }
            for one in decisions
        ],
    )
    pardoned = [one.node_id for one in decisions if one.decision is Decision.PARDONED]
    if pardoned:
        connection.execute(update(trust).where(trust.c.node_id.in_(pardoned)).values(pardon_wanted_at=None))


def write_coarse_classes(connection: Connection, classes: Sequence[CoarseClass]) -> None:
    write_meta(connection, COARSE_CLASSES, json.dumps(classes))


def read_coarse_classes(connection: Connection) -> tuple[CoarseClass, ...]:
    written = connection.scalar(select(run_meta.c.value).where(run_meta.c.key == COARSE_CLASSES))
    return tuple(
        CoarseClass(NumericsClass(*numerics), draws, claims) for numerics, draws, claims in json.loads(written or "[]")
    )


def read_standings(connection: Connection) -> tuple[StandingRow, ...]:
    """Return the standing of every node that was ever checked, ordered by node id."""
    return tuple(
        StandingRow(
            node_id=row.node_id,
            state=StandingState(row.state),
            numerics=NumericsClass(*row.numerics),
            num_verified=row.num_verified,
            sums=_sums(row.sums) if _is_todays(row.shown) else NOTHING,
            proof=row.proof,
            shown=_evidence(row.shown),
            num_checked=row.num_checked,
            num_failed=row.num_failed,
            checked_at=row.checked_at,
            reason=row.reason,
            since=row.since,
        )
        for row in connection.execute(select(trust).order_by(trust.c.node_id))
    )


def want_pardon(connection: Connection, node_ids: Collection[str], now: float) -> None:
    """Record that an operator wants these nodes pardoned. The hub polls for such requests."""
    connection.execute(update(trust).where(trust.c.node_id.in_(node_ids)).values(pardon_wanted_at=now))


def read_wanted_pardons(connection: Connection) -> frozenset[str]:
    return frozenset(connection.scalars(select(trust.c.node_id).where(trust.c.pardon_wanted_at.is_not(None))))


def _columns(row: StandingRow) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in StandingRow.__slots__}
    return {**values, "numerics": list(row.numerics), "sums": list(row.sums), "shown": _as_json(row.shown)}


def _as_json(evidence: Evidence) -> dict[str, Any]:
    """Return the evidence as JSON, without its curves (log-likelihoods at each rounding scale): they are large, and new
    checks soon restore them.
    """
    return {name: list(value) if isinstance(value := getattr(evidence, name), tuple) else value for name in STORED}


def _evidence(stored: dict[str, Any]) -> Evidence:
    if not _is_todays(stored):
        return NO_EVIDENCE
    return replace(NO_EVIDENCE, **{**stored, "draws": tuple(stored["draws"]), "claims": tuple(stored["claims"])})


def _sums(stored: list[float]) -> Sums:
    """Return the stored sums of the statistical tests. Missing sums of the reward test alone start at 0. If another
    release stored another number of sums, all start at 0.
    """
    if len(stored) == Alternative.SHOPPED:
        return (*stored, *NOTHING[Alternative.SHOPPED :])
    return tuple(stored) if len(stored) == len(NOTHING) else NOTHING


def _is_todays(stored: dict[str, Any]) -> bool:
    counts = len(DRAW_EDGES) + 1, len(CLAIM_EDGES) + 1
    return set(stored) == set(STORED) and (len(stored["draws"]), len(stored["claims"])) == counts
