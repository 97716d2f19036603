"""What became of rollouts whose rows are not in the books any more."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "old_receipts",
        sa.Column("block", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("receipts", sa.LargeBinary, nullable=False),
    )
