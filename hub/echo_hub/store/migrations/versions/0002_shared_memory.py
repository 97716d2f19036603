"""Fetches count what came through the memory of the hub's host."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("fetches", sa.Column("shared_memory_bytes", sa.BigInteger, nullable=False, server_default="0"))
