"""Indices of what is under way alone, and of fetches in the order in which a version arrived: what is final is most of
a run, and is not looked for by its state."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("ix_rollouts_state", "rollouts")
    _only("ix_rollouts_unfinished", "rollouts", ["state", "node_id"], "state IN ('leased', 'received', 'scored')")
    _only("ix_groups_open", "groups", ["group_id"], "step IS NULL AND drop_reason IS NULL")
    op.drop_index("ix_fetches_policy_version", "fetches")
    op.create_index("ix_fetches_version", "fetches", ["policy_version", "broadcast_s"])


def _only(name: str, table: str, columns: list[str], condition: str) -> None:
    where = sa.text(condition)
    op.create_index(name, table, columns, sqlite_where=where, postgresql_where=where)
