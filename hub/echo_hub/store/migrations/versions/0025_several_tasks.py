"""Figures by evaluation set, and of each step by task."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "set_evaluations",
        sa.Column("policy_version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(16), primary_key=True),
        sa.Column("name", sa.String(40), primary_key=True),
        sa.Column("num_problems", sa.Integer, nullable=False),
        sa.Column("samples", sa.Integer, nullable=False),
        sa.Column("num_unscored", sa.Integer, nullable=False),
        sa.Column("accuracy", sa.Double, nullable=False),
        sa.Column("accuracy_error", sa.Double, nullable=False),
        sa.Column("pass_at", sa.JSON, nullable=False),
        sa.Column("mean_reward", sa.Double, nullable=False),
        sa.Column("mean_tokens", sa.Double, nullable=False),
        sa.Column("share_truncated", sa.Double, nullable=False),
        sa.Column("seconds", sa.Double, nullable=False),
        sa.Column("evaluated_at", sa.Double, nullable=False),
        sa.Column("components", sa.JSON),
    )
    op.create_index("ix_set_evaluations_evaluated_at", "set_evaluations", ["evaluated_at"])
    op.add_column("steps", sa.Column("by_task", sa.JSON))
