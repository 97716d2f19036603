"""Tables of tenants: sessions, models, samplers, requests, journal, checkpoints, versions and totals."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _create_owners()
    _create_requests()
    _create_weights()


def _only_where(condition: str) -> dict[str, Any]:
    return {"sqlite_where": sa.text(condition), "postgresql_where": sa.text(condition)}


def _create_owners() -> None:
    op.create_table(
        "tenant_sessions",
        sa.Column("session_id", sa.String(64), primary_key=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("about", sa.JSON, nullable=False),
        sa.Column("made_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double),
        sa.Index("ix_tenant_sessions_live", "session_id", **_only_where("ended_at IS NULL")),
        sa.Index("ix_tenant_sessions_ended", "ended_at"),
    )
    op.create_table(
        "tenant_models",
        sa.Column("model_id", sa.String(96), primary_key=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("base_model", sa.String(256), nullable=False),
        sa.Column("lora", sa.JSON, nullable=False),
        sa.Column("user_metadata", sa.JSON, nullable=False),
        sa.Column("made_at", sa.Double, nullable=False),
        sa.Column("last_request_at", sa.Double, nullable=False),
        sa.Column("steps", sa.BigInteger, nullable=False),
        sa.Column("next_seq", sa.BigInteger, nullable=False),
        sa.Column("covered_seq", sa.BigInteger, nullable=False),
        sa.Column("directory", sa.Text, nullable=False),
        sa.Column("ended_at", sa.Double),
        sa.Index("ix_tenant_models_tenant", "tenant_id", "made_at"),
        sa.Index("ix_tenant_models_session_id", "session_id"),
    )
    op.create_table(
        "tenant_samplers",
        sa.Column("sampler_id", sa.String(96), primary_key=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("base_model", sa.String(256), nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("model_id", sa.String(96), nullable=False),
        sa.Column("policy_version", sa.BigInteger, nullable=False),
        sa.Column("inflight", sa.Boolean, nullable=False),
        sa.Column("made_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double),
        sa.Index("ix_tenant_samplers_session_id", "session_id"),
    )


def _create_requests() -> None:
    op.create_table(
        "tenant_requests",
        sa.Column("request_id", sa.String(64), primary_key=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("owner_id", sa.String(96), nullable=False),
        sa.Column("seq_id", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.String(24), nullable=False),
        sa.Column("state", sa.String(8), nullable=False),
        sa.Column("made_at", sa.Double, nullable=False),
        sa.Column("body", sa.LargeBinary),
        sa.Column("outcome", sa.LargeBinary),
        sa.Column("ended_at", sa.Double),
        sa.Column("end_number", sa.BigInteger),
        sa.Column("read_at", sa.Double),
        sa.Index("ix_tenant_requests_identity", "owner_id", "seq_id", unique=True),
        sa.Index("ix_tenant_requests_ended", "owner_id", "end_number"),
        sa.Index("ix_tenant_requests_waiting", "request_id", **_only_where("state = 'waiting'")),
        sa.Index("ix_tenant_requests_kept", "ended_at", **_only_where("outcome IS NOT NULL")),
        sa.Index("ix_tenant_requests_end_number", "end_number"),
        sa.Index("ix_tenant_requests_session_id", "session_id"),
    )
    op.create_table(
        "tenant_journal",
        sa.Column("model_id", sa.String(96), primary_key=True),
        sa.Column("seq_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(24), nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "tenant_tallies",
        sa.Column("tenant_id", sa.String(64), primary_key=True),
        sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("drawn_tokens", sa.BigInteger, nullable=False),
        sa.Column("trained_tokens", sa.BigInteger, nullable=False),
        sa.Index("ix_tenant_tallies_day", "day"),
    )


def _create_weights() -> None:
    op.create_table(
        "tenant_checkpoints",
        sa.Column("path", sa.String(512), primary_key=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("model_id", sa.String(96), nullable=False),
        sa.Column("kind", sa.String(24), nullable=False),
        sa.Column("made_at", sa.Double, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("directory", sa.Text, nullable=False),
        sa.Column("policy_version", sa.BigInteger, nullable=False),
        sa.Column("steps", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.Double),
        sa.Column("recipients", sa.JSON, nullable=False),
        sa.Column("user_metadata", sa.JSON, nullable=False),
        sa.Index("ix_tenant_checkpoints_tenant", "tenant_id", "made_at"),
        sa.Index("ix_tenant_checkpoints_expiring", "expires_at", **_only_where("expires_at IS NOT NULL")),
        sa.Index("ix_tenant_checkpoints_model_id", "model_id"),
    )
    op.create_table(
        "tenant_versions",
        sa.Column("policy_version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("model_id", sa.String(96), nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("made_at", sa.Double, nullable=False),
        sa.Column("withdrawn_at", sa.Double),
        sa.Index("ix_tenant_versions_live", "policy_version", **_only_where("withdrawn_at IS NULL")),
    )
