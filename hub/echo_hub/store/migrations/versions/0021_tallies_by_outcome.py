"""Sums over all nodes' tallies are made of an index that holds nothing else."""

from __future__ import annotations

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_tallies_outcome", "tallies", ["outcome", "node_id", "rollouts"])
