"""Groups of tenants' samples that nodes draw."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "answers",
        sa.Column("group_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("policy_version", sa.BigInteger, nullable=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("prompt_ids", sa.LargeBinary, nullable=False),
        sa.Column("sampling", sa.JSON, nullable=False),
        sa.Column("is_checked", sa.Boolean, nullable=False),
        sa.Column("members", sa.JSON, nullable=False),
        sa.Column("opened_at", sa.Double, nullable=False),
    )
