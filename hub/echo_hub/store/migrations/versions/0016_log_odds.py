"""How far draws lie outside is counted in log-odds: what nodes have shown in other classes is forgotten."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    trust = sa.table("trust", sa.column("shown", sa.JSON), sa.column("sums", sa.JSON))
    op.execute(sa.update(trust).values(shown={}, sums=[]))
