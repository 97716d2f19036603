"""Copies of tokens for people to read, when a rollout was scored and became final, and indices to look for rollouts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("scored_at", "final_at"):
        op.add_column("rollouts", sa.Column(name, sa.Double))
    op.add_column("rollouts", sa.Column("not_kept", sa.String(8)))
    op.create_index("ix_rollouts_node", "rollouts", ["node_id", "lease_id", "index"])
    op.create_index("ix_rollouts_version", "rollouts", ["policy_version", "lease_id", "index"])
    dropped, checked = sa.column("drop_reason").is_not(None), sa.text("checked <> 'no'")
    for name, column, only in (
        ("ix_rollouts_dropped", "drop_reason", dropped),
        ("ix_rollouts_checked", "checked", checked),
    ):
        op.create_index(name, "rollouts", [column, "lease_id", "index"], sqlite_where=only, postgresql_where=only)
    op.create_table(
        "kept",
        sa.Column("lease_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("index", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("completion_ids", sa.LargeBinary, nullable=False),
        sa.Column("behavior_logprobs", sa.LargeBinary, nullable=False),
        sa.Column("finish_reason", sa.String(16), nullable=False),
        sa.Column("sampling_s", sa.Double, nullable=False),
        sa.Column("observation_ids", sa.LargeBinary),
        sa.Column("spans", sa.JSON),
        sa.Column("size_bytes", sa.Integer, nullable=False),
    )
    op.create_table(
        "keeping_tallies",
        sa.Column("outcome", sa.String(8), primary_key=True),
        sa.Column("rollouts", sa.BigInteger, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
    )
