"""Indices for what the hub asks for every day, so that it never walks a whole run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_evaluations_evaluated_at", "evaluations", ["evaluated_at"])
    banned, kept = sa.column("banned_at").is_not(None), sa.column("pruned", sa.Boolean).is_(False)
    op.create_index("ix_nodes_banned", "nodes", ["banned_at"], sqlite_where=banned, postgresql_where=banned)
    op.create_index("ix_steps_kept", "steps", ["step"], sqlite_where=kept, postgresql_where=kept)
