"""Rollouts that several nodes drew: who drew how much."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("payloads", sa.Column("spans", sa.JSON))
