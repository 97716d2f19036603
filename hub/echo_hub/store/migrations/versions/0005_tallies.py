"""Running totals of final rollouts and of fetches; drops by reason at each step."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tallies",
        sa.Column("node_id", sa.String(64), primary_key=True),
        sa.Column("outcome", sa.String(16), primary_key=True),
        sa.Column("rollouts", sa.BigInteger, nullable=False),
        sa.Column("received", sa.BigInteger, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
    )
    op.execute(
        "INSERT INTO tallies SELECT node_id, coalesce(drop_reason, state), count(*), count(num_tokens), "
        "coalesce(sum(num_tokens), 0) FROM rollouts WHERE state IN ('trained', 'dropped') "
        "GROUP BY node_id, coalesce(drop_reason, state)"
    )
    op.create_table(
        "fetch_tallies",
        sa.Column("transport", sa.String(16), primary_key=True),
        sa.Column("fetches", sa.BigInteger, nullable=False),
    )
    op.execute(
        "INSERT INTO fetch_tallies SELECT transport, count(*) FROM (SELECT CASE "
        "WHEN shared_memory_bytes > 0 THEN 'shared_memory' WHEN swarm_bytes >= web_seed_bytes THEN 'swarm' "
        "ELSE 'web_seed' END AS transport FROM fetches WHERE policy_version IS NOT NULL) AS told GROUP BY transport"
    )
    op.drop_index("ix_rollouts_books", "rollouts")
    op.create_index("ix_rollouts_state", "rollouts", ["state", "node_id"])
    op.add_column("steps", sa.Column("dropped", sa.JSON))
