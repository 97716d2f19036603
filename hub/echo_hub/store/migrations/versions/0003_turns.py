"""Episodes of several turns: each rollout's turn, and what the environment answered to it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rollouts", sa.Column("turn", sa.Integer, nullable=False, server_default="0"))
    op.add_column("payloads", sa.Column("observation_ids", sa.LargeBinary))
