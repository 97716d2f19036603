"""A rollout with a reward is `scored`."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("UPDATE rollouts SET state = 'scored' WHERE state = 'verified'")
