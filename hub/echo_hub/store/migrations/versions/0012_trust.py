"""What the hub thinks of nodes, its log of decisions, and which rollouts were checked."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rollouts", sa.Column("checked", sa.String(8), nullable=False, server_default="no"))
    op.create_table(
        "trust",
        sa.Column("node_id", sa.String(64), primary_key=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("numerics", sa.JSON, nullable=False),
        sa.Column("num_verified", sa.BigInteger, nullable=False),
        sa.Column("sums", sa.JSON, nullable=False),
        sa.Column("proof", sa.Double, nullable=False),
        sa.Column("shown", sa.JSON, nullable=False),
        sa.Column("num_checked", sa.BigInteger, nullable=False),
        sa.Column("num_failed", sa.BigInteger, nullable=False),
        sa.Column("checked_at", sa.Double),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("since", sa.Double, nullable=False),
        sa.Column("pardon_wanted_at", sa.Double),
    )
    wanted = sa.column("pardon_wanted_at").is_not(None)
    op.create_index("ix_trust_pardons", "trust", ["pardon_wanted_at"], sqlite_where=wanted, postgresql_where=wanted)
    op.create_table(
        "trust_log",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("decided_at", sa.Double, nullable=False),
        sa.Column("node_id", sa.String(64), nullable=False, index=True),
        sa.Column("decision", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("rollout_id", sa.String(64), nullable=False),
        sa.Column("evidence", sa.JSON),
    )
