"""What nodes ask for, and what they have cost."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("cost_per_hour", sa.Double, nullable=False, server_default="0"))
    op.add_column("nodes", sa.Column("power_watts", sa.Double, nullable=False, server_default="0"))
    op.create_table(
        "costs",
        sa.Column("node_id", sa.String(64), primary_key=True),
        sa.Column("active_s", sa.Double, nullable=False),
        sa.Column("dollars", sa.Double, nullable=False),
    )
