"""What rewards are made of: of each rollout its components, of each step and evaluation their means."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("rollouts", "steps", "evaluations"):
        op.add_column(table, sa.Column("components", sa.JSON))
