"""Of each group, its prompt's key and how well it did."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("groups", sa.Column("prompt", sa.BigInteger))
    op.add_column("groups", sa.Column("pass_rate", sa.Double))
    rated = sa.text("pass_rate IS NOT NULL")
    op.create_index("ix_groups_rated", "groups", ["group_id"], sqlite_where=rated, postgresql_where=rated)
