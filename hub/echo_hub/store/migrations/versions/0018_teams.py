"""Teams of nodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "teams",
        sa.Column("team_id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("name", sa.String(40), nullable=False),
        sa.Column("name_key", sa.String(160), nullable=False, unique=True),
        sa.Column("founder", sa.String(64), nullable=False),
        sa.Column("founded_at", sa.Double, nullable=False),
    )
    op.create_table(
        "team_members",
        sa.Column("node_id", sa.String(64), primary_key=True),
        sa.Column("team_id", sa.Integer, nullable=False),
        sa.Column("joined_at", sa.Double, nullable=False),
    )
    op.create_index("ix_team_members_team_id", "team_members", ["team_id"])
