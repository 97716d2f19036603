"""One node's work for the run, as the node's certificate states it. Reads a few rows of running totals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Table, select

from echo_hub.store.tables import checking, nodes, tallies, trust
from echo_hub.store.tallies import EVALUATED, TRAINED
from echo_shared.records.contribution import Contribution, moment


def read_contribution(
    connection: Connection, node_id: str, *, run_id: str, run_name: str, hub_key: bytes, now: float
) -> Contribution | None:
    """Return the node's contribution; None if it never joined the run."""
    node = _row(connection, nodes, node_id)
    if not node:
        return None
    rows = connection.execute(select(tallies).where(tallies.c.node_id == node_id)).mappings()
    final: dict[str, Mapping[str, Any]] = {row["outcome"]: dict(row) for row in rows}
    trained, evaluated = final.get(TRAINED, {}), final.get(EVALUATED, {})
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
        checks_passed=judged.get("num_checked", 0) - num_failed,
        checks_failed=num_failed,
        others_checked_rollouts=checked.get("rollouts", 0),
        others_checked_tokens=checked.get("tokens", 0),
    )


def _row(connection: Connection, table: Table, node_id: str) -> Mapping[str, Any]:
    """Return the node's row in a table; empty if it has none."""
    found = connection.execute(select(table).where(table.c.node_id == node_id)).mappings().one_or_none()
    return {} if found is None else dict(found)
