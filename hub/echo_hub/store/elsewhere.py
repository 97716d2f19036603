"""Credit across runs: export this run's credit for other hubs, and import the signed exports of other hubs.

An export holds everything that the nodes of a run have earned so far. So a newer export replaces the older one of the
same run, and importing an export twice changes nothing. Teams belong to one hub: credit from other runs does not count
for a team.
"""

from __future__ import annotations

from typing import Final, Literal

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from echo_hub.store.credit import ensure, in_parts
from echo_hub.store.tables import credit, credit_elsewhere, nodes, runs_elsewhere
from echo_shared.records.run_credit import NodeCredit, RunCredit
from echo_shared.signing.signed_document import moment

Taken = Literal["new", "newer", "known"]
"""Result of an import. "new": the first export of its run. "newer": it replaced an older export. "known": the import
was skipped, because the stored export is at least as new."""


def read_run_credit(connection: Connection, *, run_id: str, run_name: str, hub_key: bytes, now: float) -> RunCredit:
    """Return everything that all nodes have earned in this run."""
    name = func.coalesce(nodes.c.name, credit.c.holder).label("name")
    own = (
        select(credit.c.holder, name, credit.c.rollouts, credit.c.tokens)
        .select_from(credit.outerjoin(nodes, nodes.c.node_id == credit.c.holder))
        .where(credit.c.kind == "node", credit.c.rollouts > 0)
    )
    rows = sorted(connection.execute(own), key=lambda row: row.holder)
    return RunCredit(
        run_id=run_id,
        run_name=run_name,
        hub_key=hub_key.hex(),
        issued_at=moment(now),
        nodes=tuple(
            NodeCredit(node_id=row.holder, node_name=row.name, rollouts=row.rollouts, tokens=row.tokens) for row in rows
        ),
    )


def read_known_hubs(connection: Connection) -> frozenset[str]:
    return frozenset(connection.scalars(select(runs_elsewhere.c.hub_key)))


def take_in(connection: Connection, said: RunCredit, now: float) -> Taken:
    """Import an export. The caller has checked its signature and that its hub is trusted."""
    of_run = runs_elsewhere.c.run_id == said.run_id
    issued_at = connection.scalar(select(runs_elsewhere.c.issued_at).where(of_run))
    if issued_at is not None and issued_at >= said.issued_at:  # UTC times in this format sort as texts.
        return "known"
    mine = credit_elsewhere.c.run_id == said.run_id
    node_ids = {*connection.scalars(select(credit_elsewhere.c.node_id).where(mine)), *(n.node_id for n in said.nodes)}
    connection.execute(delete(credit_elsewhere).where(mine))
    connection.execute(delete(runs_elsewhere).where(of_run))
    about = said.model_dump(include={"run_id", "run_name", "hub_key", "issued_at"})
    connection.execute(insert(runs_elsewhere), {**about, "imported_at": now})
    if said.nodes:
        rows = [{"run_id": said.run_id, **node.model_dump()} for node in said.nodes]
        connection.execute(insert(credit_elsewhere), rows)
    _sum_up(connection, sorted(node_ids))
    return "new" if issued_at is None else "newer"


_SUM: Final = (
    update(credit)
    .where(credit.c.holder == bindparam("of"))
    .values(elsewhere_rollouts=bindparam("sum_rollouts"), elsewhere_tokens=bindparam("sum_tokens"))
)


def _sum_up(connection: Connection, node_ids: list[str]) -> None:
    """Recompute these nodes' credit from other runs as the sum over all imported exports."""
    sums = select(
        credit_elsewhere.c.node_id,
        func.sum(credit_elsewhere.c.rollouts).label("rollouts"),
        func.sum(credit_elsewhere.c.tokens).label("tokens"),
    ).group_by(credit_elsewhere.c.node_id)
    for part in in_parts(node_ids):
        ensure(connection, part)
        found = {row.node_id: row for row in connection.execute(sums.where(credit_elsewhere.c.node_id.in_(part)))}
        connection.execute(
            _SUM,
            [
                {
                    "of": node_id,
                    "sum_rollouts": int(found[node_id].rollouts) if node_id in found else 0,
                    "sum_tokens": int(found[node_id].tokens) if node_id in found else 0,
                }
                for node_id in part
            ],
        )
