"""How long each version took to arrive, for when its fetches are forgotten."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("arrived_p50_s", "arrived_p95_s", "arrived_max_s"):
        op.add_column("versions", sa.Column(name, sa.Double))
