"""Limits that operators have set for single tenants."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tenant_limits",
        sa.Column("tenant_id", sa.String(64), primary_key=True),
        sa.Column("tokens_per_day", sa.BigInteger),
        sa.Column("blocked_at", sa.Double),
    )
