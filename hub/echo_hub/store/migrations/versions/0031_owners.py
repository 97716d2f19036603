"""Owners of nodes: each node's owner, and the owners whose nodes share one leaderboard entry."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("owner_key", sa.String(64)))
    op.add_column("nodes", sa.Column("owner_claim", sa.String(128)))
    has_owner = sa.text("owner_key IS NOT NULL")
    op.create_index("ix_nodes_owner", "nodes", ["owner_key"], sqlite_where=has_owner, postgresql_where=has_owner)
    op.create_table("owners", sa.Column("owner_key", sa.String(64), primary_key=True))
