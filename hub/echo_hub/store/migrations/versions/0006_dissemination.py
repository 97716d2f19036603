"""What each version was announced as; how long it took to each node, and what was pushed and handed on to it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("versions", sa.Column("payload_bytes", sa.BigInteger))
    op.add_column("versions", sa.Column("carrier", sa.String(16)))
    op.add_column("versions", sa.Column("way", sa.String(16)))
    op.add_column("fetches", sa.Column("pushed_bytes", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("fetches", sa.Column("mesh_bytes", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("fetches", sa.Column("model_hub_bytes", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("fetches", sa.Column("broadcast_s", sa.Double))
