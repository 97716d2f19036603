"""All tables of the first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
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
    )
    op.create_table(
        "groups",
        sa.Column("group_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("opened_at", sa.Double, nullable=False),
        sa.Column("step", sa.BigInteger),
        sa.Column("drop_reason", sa.String(16)),
    )
    _create_rollouts()
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
        sa.Column("planned_at", sa.Double, nullable=False),
        sa.Column("trained_at", sa.Double),
        sa.Column("metrics", sa.JSON),
        sa.Column("pruned", sa.Boolean, nullable=False),
    )
    op.create_table(
        "versions",
        sa.Column("policy_version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("published_at", sa.Double, nullable=False),
    )
    op.create_table(
        "fetches",
        sa.Column("node_id", sa.String(64), primary_key=True),
        sa.Column("info_hash", sa.String(40), primary_key=True),
        sa.Column("policy_version", sa.BigInteger),
        sa.Column("seconds", sa.Double, nullable=False),
        sa.Column("swarm_bytes", sa.BigInteger, nullable=False),
        sa.Column("web_seed_bytes", sa.BigInteger, nullable=False),
        sa.Column("fetched_at", sa.Double, nullable=False),
    )
    op.create_index("ix_fetches_policy_version", "fetches", ["policy_version"])
    op.create_table(
        "evaluations",
        sa.Column("policy_version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("accuracy", sa.Double, nullable=False),
        sa.Column("num_problems", sa.Integer, nullable=False),
        sa.Column("evaluated_at", sa.Double, nullable=False),
    )


def _create_rollouts() -> None:
    op.create_table(
        "rollouts",
        sa.Column("lease_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("index", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("node_id", sa.String(64), nullable=False),
        sa.Column("group_id", sa.BigInteger, nullable=False),
        sa.Column("policy_version", sa.BigInteger, nullable=False),
        sa.Column("leased_at", sa.Double, nullable=False),
        sa.Column("deadline", sa.Double, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("drop_reason", sa.String(16)),
        sa.Column("detail", sa.Text),
        sa.Column("reward", sa.Double),
        sa.Column("num_tokens", sa.Integer),
        sa.Column("received_at", sa.Double),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_rollouts_group", "rollouts", ["group_id"])
    op.create_index("ix_rollouts_books", "rollouts", ["node_id", "state", "drop_reason", "num_tokens"])
    op.create_table(
        "payloads",
        sa.Column("lease_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("index", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("completion_ids", sa.LargeBinary, nullable=False),
        sa.Column("behavior_logprobs", sa.LargeBinary, nullable=False),
        sa.Column("finish_reason", sa.String(16), nullable=False),
        sa.Column("sampling_s", sa.Double, nullable=False),
    )


def downgrade() -> None:
    for table in ("evaluations", "fetches", "versions", "steps", "payloads", "rollouts", "groups", "nodes", "run_meta"):
        op.drop_table(table)
