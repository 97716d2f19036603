"""All tables of release 0.2.

Release 0.2 is the oldest release whose databases are migrated. Its schema has the number 0030. A lower number belongs
to an older release: `echo_hub.store.database.migrate` refuses such a database.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _create_rollouts()
    _create_training()
    _create_nodes()
    _create_credit()
    _create_totals()
    _create_operation()


def _create_rollouts() -> None:
    op.create_table(
        "groups",
        sa.Column("group_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("opened_at", sa.Double, nullable=False),
        sa.Column("step", sa.BigInteger),
        sa.Column("drop_reason", sa.String(16)),
        sa.Column("prompt", sa.BigInteger),
        sa.Column("pass_rate", sa.Double),
        sa.Index("ix_groups_rated", "group_id", **_only_where("pass_rate IS NOT NULL")),
        sa.Index("ix_groups_open", "group_id", **_only_where("step IS NULL AND drop_reason IS NULL")),
    )
    op.create_table(
        "rollouts",
        sa.Column("lease_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("index", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("node_id", sa.String(64), nullable=False),
        sa.Column("group_id", sa.BigInteger, nullable=False),
        sa.Column("turn", sa.Integer, nullable=False, server_default="0"),
        sa.Column("policy_version", sa.BigInteger, nullable=False),
        sa.Column("leased_at", sa.Double, nullable=False),
        sa.Column("deadline", sa.Double, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("drop_reason", sa.String(16)),
        sa.Column("detail", sa.Text),
        sa.Column("reward", sa.Double),
        sa.Column("components", sa.JSON),
        sa.Column("turn_reward", sa.Double),
        sa.Column("num_tokens", sa.Integer),
        sa.Column("received_at", sa.Double),
        sa.Column("checked", sa.String(8), nullable=False, server_default="no"),
        sa.Column("scored_at", sa.Double),
        sa.Column("final_at", sa.Double),
        sa.Column("not_kept", sa.String(8)),
        sa.Index("ix_rollouts_group", "group_id"),
        sa.Index("ix_rollouts_node", "node_id", "lease_id", "index"),
        sa.Index("ix_rollouts_version", "policy_version", "lease_id", "index"),
        sa.Index(
            "ix_rollouts_unfinished", "state", "node_id", **_only_where("state IN ('leased', 'received', 'scored')")
        ),
        sa.Index("ix_rollouts_dropped", "drop_reason", "lease_id", "index", **_only_where("drop_reason IS NOT NULL")),
        sa.Index("ix_rollouts_checked", "checked", "lease_id", "index", **_only_where("checked <> 'no'")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "payloads",
        sa.Column("lease_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("index", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("completion_ids", sa.LargeBinary, nullable=False),
        sa.Column("behavior_logprobs", sa.LargeBinary, nullable=False),
        sa.Column("finish_reason", sa.String(16), nullable=False),
        sa.Column("sampling_s", sa.Double, nullable=False),
        sa.Column("observation_ids", sa.LargeBinary),
        sa.Column("spans", sa.JSON),
    )
    op.create_table(
        "kept",
        sa.Column("lease_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("index", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("completion_ids", sa.LargeBinary, nullable=False),
        sa.Column("behavior_logprobs", sa.LargeBinary, nullable=False),
        sa.Column("finish_reason", sa.String(16), nullable=False),
        sa.Column("sampling_s", sa.Double, nullable=False),
        sa.Column("observation_ids", sa.LargeBinary),
        sa.Column("spans", sa.JSON),
        sa.Column("size_bytes", sa.Integer, nullable=False),
    )
    op.create_table(
        "old_receipts",
        sa.Column("block", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("receipts", sa.LargeBinary, nullable=False),
    )


def _create_training() -> None:
    op.create_table(
        "steps",
        sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("group_ids", sa.JSON, nullable=False),
        sa.Column("rollout_ids", sa.JSON, nullable=False),
        sa.Column("staleness", sa.JSON, nullable=False),
        sa.Column("num_groups", sa.Integer, nullable=False),
        sa.Column("num_rollouts", sa.Integer, nullable=False),
        sa.Column("num_tokens", sa.BigInteger, nullable=False),
        sa.Column("mean_reward", sa.Double, nullable=False),
        sa.Column("components", sa.JSON),
        sa.Column("planned_at", sa.Double, nullable=False),
        sa.Column("trained_at", sa.Double),
        sa.Column("metrics", sa.JSON),
        sa.Column("dropped", sa.JSON),
        sa.Column("by_task", sa.JSON),
        sa.Column("pruned", sa.Boolean, nullable=False),
        sa.Index("ix_steps_kept", "step", **_only_where(sa.column("pruned", sa.Boolean).is_(False))),
    )
    op.create_table(
        "uncounted",
        sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("part", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("lease_ids", sa.JSON, nullable=False),
        sa.Column("drawn_by_several", sa.JSON, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
    )
    op.create_table(
        "versions",
        sa.Column("policy_version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("published_at", sa.Double, nullable=False),
        sa.Column("payload_bytes", sa.BigInteger),
        sa.Column("carrier", sa.String(16)),
        sa.Column("way", sa.String(16)),
        sa.Column("arrived_p50_s", sa.Double),
        sa.Column("arrived_p95_s", sa.Double),
        sa.Column("arrived_max_s", sa.Double),
    )
    op.create_table(
        "fetches",
        sa.Column("node_id", sa.String(64), primary_key=True),
        sa.Column("info_hash", sa.String(40), primary_key=True),
        sa.Column("policy_version", sa.BigInteger),
        sa.Column("seconds", sa.Double, nullable=False),
        sa.Column("swarm_bytes", sa.BigInteger, nullable=False),
        sa.Column("web_seed_bytes", sa.BigInteger, nullable=False),
        sa.Column("shared_memory_bytes", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("fetched_at", sa.Double, nullable=False),
        sa.Column("pushed_bytes", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("mesh_bytes", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("model_hub_bytes", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("broadcast_s", sa.Double),
        sa.Index("ix_fetches_version", "policy_version", "broadcast_s"),
    )
    op.create_table(
        "evaluations",
        sa.Column("policy_version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(16), primary_key=True),
        sa.Column("num_problems", sa.Integer, nullable=False),
        sa.Column("samples", sa.Integer, nullable=False),
        sa.Column("num_unscored", sa.Integer, nullable=False),
        sa.Column("accuracy", sa.Double, nullable=False),
        sa.Column("accuracy_error", sa.Double, nullable=False),
        sa.Column("pass_at", sa.JSON, nullable=False),
        sa.Column("mean_reward", sa.Double, nullable=False),
        sa.Column("components", sa.JSON),
        sa.Column("mean_tokens", sa.Double, nullable=False),
        sa.Column("share_truncated", sa.Double, nullable=False),
        sa.Column("seconds", sa.Double, nullable=False),
        sa.Column("evaluated_at", sa.Double, nullable=False, index=True),
    )
    op.create_table(
        "set_evaluations",
        sa.Column("policy_version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(16), primary_key=True),
        sa.Column("name", sa.String(40), primary_key=True),
        sa.Column("num_problems", sa.Integer, nullable=False),
        sa.Column("samples", sa.Integer, nullable=False),
        sa.Column("num_unscored", sa.Integer, nullable=False),
        sa.Column("accuracy", sa.Double, nullable=False),
        sa.Column("accuracy_error", sa.Double, nullable=False),
        sa.Column("pass_at", sa.JSON, nullable=False),
        sa.Column("mean_reward", sa.Double, nullable=False),
        sa.Column("mean_tokens", sa.Double, nullable=False),
        sa.Column("share_truncated", sa.Double, nullable=False),
        sa.Column("seconds", sa.Double, nullable=False),
        sa.Column("evaluated_at", sa.Double, nullable=False, index=True),
        sa.Column("components", sa.JSON),
    )


def _create_nodes() -> None:
    op.create_table(
        "run_meta",
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )
    op.create_table(
        "nodes",
        sa.Column("node_id", sa.String(64), primary_key=True),
        sa.Column("public_key", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("backend", sa.String(64), nullable=False),
        sa.Column("device", sa.String(128), nullable=False),
        sa.Column("first_seen", sa.Double, nullable=False),
        sa.Column("last_seen", sa.Double, nullable=False),
        sa.Column("banned_at", sa.Double),
        sa.Column("cost_per_hour", sa.Double, nullable=False, server_default="0"),
        sa.Column("power_watts", sa.Double, nullable=False, server_default="0"),
        sa.Column("invite_id", sa.Integer),
        sa.Index("ix_nodes_banned", "banned_at", **_only_where("banned_at IS NOT NULL")),
    )
    op.create_table(
        "invites",
        sa.Column("invite_id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("token_hash", sa.String(64), nullable=False, unique=True),
        sa.Column("max_keys", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("revoked_at", sa.Double),
    )
    op.create_table(
        "trust",
        sa.Column("node_id", sa.String(64), primary_key=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("numerics", sa.JSON, nullable=False),
        sa.Column("num_verified", sa.BigInteger, nullable=False),
        sa.Column("sums", sa.JSON, nullable=False),
        sa.Column("proof", sa.Double, nullable=False),
        sa.Column("shown", sa.JSON, nullable=False),
        sa.Column("num_checked", sa.BigInteger, nullable=False),
        sa.Column("num_failed", sa.BigInteger, nullable=False),
        sa.Column("checked_at", sa.Double),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("since", sa.Double, nullable=False),
        sa.Column("pardon_wanted_at", sa.Double),
        sa.Index("ix_trust_pardons", "pardon_wanted_at", **_only_where("pardon_wanted_at IS NOT NULL")),
    )
    op.create_table(
        "trust_log",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("decided_at", sa.Double, nullable=False),
        sa.Column("node_id", sa.String(64), nullable=False, index=True),
        sa.Column("decision", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("rollout_id", sa.String(64), nullable=False),
        sa.Column("evidence", sa.JSON),
    )


def _create_credit() -> None:
    op.create_table(
        "credit",
        sa.Column("holder", sa.String(80), primary_key=True),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("rollouts", sa.BigInteger, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("steps", sa.BigInteger, nullable=False),
        sa.Column("recent", sa.Double),
        sa.Column("streak_days", sa.Integer, nullable=False),
        sa.Column("longest_streak", sa.Integer, nullable=False),
        sa.Column("first_day", sa.Integer),
        sa.Column("last_day", sa.Integer),
        sa.Column("elsewhere_rollouts", sa.BigInteger, nullable=False),
        sa.Column("elsewhere_tokens", sa.BigInteger, nullable=False),
        sa.Index("ix_credit_rollouts", "kind", "rollouts"),
    )
    op.create_table(
        "credit_days",
        sa.Column("holder", sa.String(80), primary_key=True),
        sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("rollouts", sa.BigInteger, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "credit_steps",
        sa.Column("holder", sa.String(80), primary_key=True),
        sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("rollouts", sa.BigInteger, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "runs_elsewhere",
        sa.Column("run_id", sa.String(64), primary_key=True),
        sa.Column("run_name", sa.String(64), nullable=False),
        sa.Column("hub_key", sa.String(64), nullable=False),
        sa.Column("issued_at", sa.String(20), nullable=False),
        sa.Column("imported_at", sa.Double, nullable=False),
    )
    op.create_table(
        "credit_elsewhere",
        sa.Column("run_id", sa.String(64), primary_key=True),
        sa.Column("node_id", sa.String(64), primary_key=True),
        sa.Column("node_name", sa.String(64), nullable=False),
        sa.Column("rollouts", sa.BigInteger, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Index("ix_credit_elsewhere_node", "node_id"),
    )
    op.create_table(
        "teams",
        sa.Column("team_id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("name", sa.String(40), nullable=False),
        sa.Column("name_key", sa.String(160), nullable=False, unique=True),
        sa.Column("founder", sa.String(64), nullable=False),
        sa.Column("founded_at", sa.Double, nullable=False),
    )
    op.create_table(
        "team_members",
        sa.Column("node_id", sa.String(64), primary_key=True),
        sa.Column("team_id", sa.Integer, nullable=False, index=True),
        sa.Column("joined_at", sa.Double, nullable=False),
    )


def _create_totals() -> None:
    op.create_table(
        "tallies",
        sa.Column("node_id", sa.String(64), primary_key=True),
        sa.Column("outcome", sa.String(16), primary_key=True),
        sa.Column("rollouts", sa.BigInteger, nullable=False),
        sa.Column("received", sa.BigInteger, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Index("ix_tallies_outcome", "outcome", "node_id", "rollouts"),
    )
    op.create_table(
        "outcome_tallies",
        sa.Column("outcome", sa.String(16), primary_key=True),
        sa.Column("rollouts", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "fetch_tallies",
        sa.Column("transport", sa.String(16), primary_key=True),
        sa.Column("fetches", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "version_tallies",
        sa.Column("policy_version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("transport", sa.String(16), primary_key=True),
        sa.Column("fetches", sa.BigInteger, nullable=False),
        sa.Column("swarm_bytes", sa.BigInteger, nullable=False),
        sa.Column("web_seed_bytes", sa.BigInteger, nullable=False),
        sa.Column("shared_memory_bytes", sa.BigInteger, nullable=False),
        sa.Column("pushed_bytes", sa.BigInteger, nullable=False),
        sa.Column("mesh_bytes", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "keeping_tallies",
        sa.Column("outcome", sa.String(8), primary_key=True),
        sa.Column("rollouts", sa.BigInteger, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "costs",
        sa.Column("node_id", sa.String(64), primary_key=True),
        sa.Column("active_s", sa.Double, nullable=False),
        sa.Column("dollars", sa.Double, nullable=False),
    )
    op.create_table(
        "checking",
        sa.Column("node_id", sa.String(64), primary_key=True),
        sa.Column("rollouts", sa.BigInteger, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
    )


def _create_operation() -> None:
    op.create_table(
        "events",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("severity", sa.String(8), nullable=False),
        sa.Column("subject", sa.String(64), nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
        sa.Index("ix_events_kind", "kind", "number"),
        sa.Index("ix_events_subject", "subject", "number"),
    )
    op.create_table(
        "actions",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("asked_at", sa.Double, nullable=False),
        sa.Column("via", sa.String(8), nullable=False),
        sa.Column("who", sa.String(128), nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("undoes", sa.BigInteger, index=True),
        sa.Column("outcome", sa.String(8), nullable=False),
        sa.Column("settled_at", sa.Double),
        sa.Column("before", sa.JSON),
        sa.Column("after", sa.JSON),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Index("ix_actions_wanted", "number", **_only_where("outcome = 'wanted'")),
    )
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


def _only_where(condition: str | sa.ColumnElement[bool]) -> dict[str, Any]:
    """Return the keyword arguments of an index that holds only these rows."""
    where = sa.text(condition) if isinstance(condition, str) else condition
    return {"sqlite_where": where, "postgresql_where": where}
