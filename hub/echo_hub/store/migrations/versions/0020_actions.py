"""What operators do: their actions, the settings that they have changed, and the tokens of their scripts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "actions",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("asked_at", sa.Double, nullable=False),
        sa.Column("via", sa.String(8), nullable=False),
        sa.Column("who", sa.String(128), nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("undoes", sa.BigInteger),
        sa.Column("outcome", sa.String(8), nullable=False),
        sa.Column("settled_at", sa.Double),
        sa.Column("before", sa.JSON),
        sa.Column("after", sa.JSON),
        sa.Column("detail", sa.Text, nullable=False),
    )
    wanted = sa.text("outcome = 'wanted'")
    op.create_index("ix_actions_wanted", "actions", ["number"], sqlite_where=wanted, postgresql_where=wanted)
    op.create_index("ix_actions_undoes", "actions", ["undoes"])
    op.create_table(
        "live_settings",
        sa.Column("name", sa.String(32), primary_key=True),
        sa.Column("value", sa.JSON, nullable=False),
    )
    op.create_table(
        "api_tokens",
        sa.Column("token_id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("scope", sa.String(8), nullable=False),
        sa.Column("token_hash", sa.String(64), nullable=False, unique=True),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("revoked_at", sa.Double),
    )
