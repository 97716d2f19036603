"""Totals that pages ask for every second are kept: of final rollouts by outcome, and of fetches by version."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

SUMS = ("swarm_bytes", "web_seed_bytes", "shared_memory_bytes", "pushed_bytes", "mesh_bytes")
TRANSPORT = (
    "CASE WHEN shared_memory_bytes > 0 THEN 'shared_memory' "
    "WHEN pushed_bytes + mesh_bytes > swarm_bytes AND pushed_bytes + mesh_bytes > web_seed_bytes "
    "THEN CASE WHEN mesh_bytes > 0 THEN 'broadcast' ELSE 'inline' END "
    "WHEN swarm_bytes >= web_seed_bytes THEN 'swarm' ELSE 'web_seed' END"
)


def upgrade() -> None:
    op.create_table(
        "outcome_tallies",
        sa.Column("outcome", sa.String(16), primary_key=True),
        sa.Column("rollouts", sa.BigInteger, nullable=False),
    )
    op.execute("INSERT INTO outcome_tallies SELECT outcome, sum(rollouts) FROM tallies GROUP BY outcome")
    op.create_table(
        "version_tallies",
        sa.Column("policy_version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("transport", sa.String(16), primary_key=True),
        sa.Column("fetches", sa.BigInteger, nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in SUMS),
    )
    sums = ", ".join(f"sum({name})" for name in SUMS)
    op.execute(
        f"INSERT INTO version_tallies SELECT policy_version, transport, count(*), {sums} FROM (SELECT policy_version, "
        f"{TRANSPORT} AS transport, {', '.join(SUMS)} FROM fetches WHERE policy_version IS NOT NULL) AS told "
        "GROUP BY policy_version, transport"
    )
