"""The tables of tenants: owners of API tokens with the scope `use`, whose programs train and sample through the hub.

    tenant_sessions ─< tenant_models      one row a session; one a model (an adapter with its optimizer) of a session ─<
    tenant_samplers    one row a sampler: fixed weights that draw samples either ─< tenant_requests           one row a
    request: its state, and its outcome until the client has read it
    tenant_models ─< tenant_journal       requests that change a model, until a checkpoint covers them
                  ─< tenant_checkpoints   weights that a tenant has saved under a path
    tenant_versions                       adapters that draw samples: number, model, step
    tenant_tallies                        running totals by tenant and day
    tenant_limits                         what operators have decided about single tenants

A tenant's id is the name of its API token. Times are seconds since the epoch.
"""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Boolean, Column, Double, Index, Integer, LargeBinary, String, Table, Text, text

from echo_hub.store.column_types import only_where
from echo_hub.store.tables import metadata

tenant_sessions = Table(
    "tenant_sessions",
    metadata,
    Column("session_id", String(64), primary_key=True),
    Column("tenant_id", String(64), nullable=False),
    Column("about", JSON, nullable=False),
    Column("made_at", Double, nullable=False),
    Column("ended_at", Double),
    # For the query of live sessions, which the hub makes at its start.
    Index("ix_tenant_sessions_live", "session_id", **only_where(text("ended_at IS NULL"))),
    Index("ix_tenant_sessions_ended", "ended_at"),
)

tenant_models = Table(
    "tenant_models",
    metadata,
    Column("model_id", String(96), primary_key=True),
    Column("tenant_id", String(64), nullable=False),
    Column("session_id", String(64), nullable=False, index=True),
    Column("base_model", String(256), nullable=False),
    Column("lora", JSON, nullable=False),
    Column("user_metadata", JSON, nullable=False),
    Column("made_at", Double, nullable=False),
    Column("last_request_at", Double, nullable=False),
    Column("steps", BigInteger, nullable=False),
    Column("next_seq", BigInteger, nullable=False),
    Column("covered_seq", BigInteger, nullable=False),
    Column("directory", Text, nullable=False),
    Column("ended_at", Double),
    Index("ix_tenant_models_tenant", "tenant_id", "made_at"),
)

tenant_samplers = Table(
    "tenant_samplers",
    metadata,
    Column("sampler_id", String(96), primary_key=True),
    Column("tenant_id", String(64), nullable=False),
    Column("session_id", String(64), nullable=False, index=True),
    Column("base_model", String(256), nullable=False),
    Column("path", Text, nullable=False),
    Column("model_id", String(96), nullable=False),
    Column("policy_version", BigInteger, nullable=False),
    Column("inflight", Boolean, nullable=False),
    Column("made_at", Double, nullable=False),
    Column("ended_at", Double),
)

tenant_requests = Table(
    "tenant_requests",
    metadata,
    Column("request_id", String(64), primary_key=True),
    Column("tenant_id", String(64), nullable=False),
    Column("session_id", String(64), nullable=False, index=True),
    Column("owner_id", String(96), nullable=False),
    Column("seq_id", BigInteger, nullable=False),
    Column("kind", String(24), nullable=False),
    Column("state", String(8), nullable=False),
    Column("made_at", Double, nullable=False),
    Column("body", LargeBinary),
    Column("outcome", LargeBinary),
    Column("ended_at", Double),
    Column("end_number", BigInteger),
    Column("read_at", Double),
    Index("ix_tenant_requests_identity", "owner_id", "seq_id", unique=True),
    Index("ix_tenant_requests_ended", "owner_id", "end_number"),
    # For the query of unfinished requests, which the hub makes at its start, and for deleting old outcomes every
    # minute.
    Index("ix_tenant_requests_waiting", "request_id", **only_where(text("state = 'waiting'"))),
    Index("ix_tenant_requests_kept", "ended_at", **only_where(text("outcome IS NOT NULL"))),
    Index("ix_tenant_requests_end_number", "end_number"),
)

tenant_journal = Table(
    "tenant_journal",
    metadata,
    Column("model_id", String(96), primary_key=True),
    Column("seq_id", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String(24), nullable=False),
    Column("body", LargeBinary, nullable=False),
)

tenant_checkpoints = Table(
    "tenant_checkpoints",
    metadata,
    Column("path", String(512), primary_key=True),
    Column("tenant_id", String(64), nullable=False),
    Column("model_id", String(96), nullable=False, index=True),
    Column("kind", String(24), nullable=False),
    Column("made_at", Double, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("directory", Text, nullable=False),
    Column("policy_version", BigInteger, nullable=False),
    Column("steps", BigInteger, nullable=False),
    Column("expires_at", Double),
    Column("recipients", JSON, nullable=False),
    Column("user_metadata", JSON, nullable=False),
    Index("ix_tenant_checkpoints_tenant", "tenant_id", "made_at"),
    Index("ix_tenant_checkpoints_expiring", "expires_at", **only_where(text("expires_at IS NOT NULL"))),
)

tenant_versions = Table(
    "tenant_versions",
    metadata,
    Column("policy_version", BigInteger, primary_key=True, autoincrement=False),
    Column("tenant_id", String(64), nullable=False),
    Column("model_id", String(96), nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("request_id", String(64), nullable=False),
    Column("made_at", Double, nullable=False),
    Column("withdrawn_at", Double),
    Index("ix_tenant_versions_live", "policy_version", **only_where(text("withdrawn_at IS NULL"))),
)

tenant_tallies = Table(
    "tenant_tallies",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("day", Integer, primary_key=True, autoincrement=False),
    Column("requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("drawn_tokens", BigInteger, nullable=False),
    Column("trained_tokens", BigInteger, nullable=False),
    Index("ix_tenant_tallies_day", "day"),
)

tenant_limits = Table(
    "tenant_limits",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("tokens_per_day", BigInteger),
    Column("blocked_at", Double),
)
