"""Parts of trained steps whose rollouts are not counted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "uncounted",
        sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("part", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("lease_ids", sa.JSON, nullable=False),
        sa.Column("drawn_by_several", sa.JSON, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
    )
