"""Routes of a rollout's tokens through a mixture-of-experts base."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("payloads", "kept"):
        op.add_column(table, sa.Column("routes", sa.LargeBinary))
