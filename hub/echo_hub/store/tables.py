"""The tables, as the newest migration leaves them (a test compares the two).

    groups ─< rollouts ─ payloads        one row a leased rollout: its receipt; its tokens until no longer needed,
                                         and the tokens of the environment's answer, if the episode continued
      step > steps                       one row a planned step: its exact batch, then its metrics
         ─< uncounted                    parts of trained steps whose rollouts are not marked as trained yet
    old_receipts                         receipts of rollouts whose rows were deleted, many in one row
    kept                                 copies of final rollouts' tokens, for people to read, up to a byte limit
    keeping_tallies                      running totals of the copies kept, and of those not kept, by reason
    nodes, versions, fetches, run_meta   one row a node; one a fetch of the newest versions; older versions keep
                                         only how long they took to arrive
    answers                              tenants' groups of samples: `echo_hub.store.answers`
    evaluations, set_evaluations         results for each version: the run's own, and each of several sets'
    invites ─< nodes                     one row an invite: its name, number of keys and expiry
    tallies, outcome_tallies             running totals of final rollouts, by node and outcome, and by outcome
    fetch_tallies, version_tallies       running totals of fetches, of all versions and by version
    costs                                running totals of each node's cost while active, in US dollars
    checking                             running totals of others' rollouts that each node recomputed
    credit ─< credit_days, credit_steps  running totals of counted work: of each node, each team and the whole run
    runs_elsewhere ─< credit_elsewhere   nodes' credit from other hubs' signed exports
    teams ─< team_members                which nodes belong to which team
    owners ─< nodes                      owners that the leaderboard shows as one entry
    actions, live_settings, api_tokens   operators' actions, the settings that they have changed, and the tokens
                                         of their scripts
    trust, trust_log                     the trust standing of each checked node, and the log of decisions
    events                               events, the newest of each kind
    tenant_...                           tenants' sessions, models and requests: see `echo_hub.store.tenant_tables`

A rollout's id "LEASE-INDEX" is stored as its two numbers. Times are seconds since the epoch.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    and_,
    text,
)

from echo_hub.store.column_types import Unsigned64, only_where
from echo_hub.store.payload_rows import columns

metadata = MetaData()


run_meta = Table(
    "run_meta",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)

nodes = Table(
    "nodes",
    metadata,
    Column("node_id", String(64), primary_key=True),
    Column("public_key", String(64), nullable=False),
    Column("name", String(64), nullable=False),
    Column("backend", String(64), nullable=False),
    Column("device", String(128), nullable=False),
    Column("first_seen", Double, nullable=False),
    Column("last_seen", Double, nullable=False),
    Column("banned_at", Double),
    Column("cost_per_hour", Double, nullable=False, server_default="0"),
    Column("power_watts", Double, nullable=False, server_default="0"),
    Column("invite_id", Integer),
    Column("owner_key", String(64)),
    Column("owner_claim", String(128)),
)
Index("ix_nodes_owner", nodes.c.owner_key, **only_where(nodes.c.owner_key.is_not(None)))
# For the hub's query of banned nodes, which it makes every second.
Index("ix_nodes_banned", nodes.c.banned_at, **only_where(nodes.c.banned_at.is_not(None)))

invites = Table(
    "invites",
    metadata,
    Column("invite_id", Integer, primary_key=True, autoincrement=True),
    Column("name", String(64), nullable=False),
    Column("token_hash", String(64), nullable=False, unique=True),
    Column("max_keys", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("revoked_at", Double),
)

groups = Table(
    "groups",
    metadata,
    Column("group_id", BigInteger, primary_key=True, autoincrement=False),
    Column("seed", Unsigned64, nullable=False),
    Column("opened_at", Double, nullable=False),
    Column("step", BigInteger),
    Column("drop_reason", String(16)),
    Column("prompt", Unsigned64),
    Column("pass_rate", Double),
)
# For the query of pass rates when the hub starts with a curriculum. Without a curriculum, the index is empty.
Index("ix_groups_rated", groups.c.group_id, **only_where(groups.c.pass_rate.is_not(None)))
IS_OPEN = text("step IS NULL AND drop_reason IS NULL")
"""A text, not an SQLAlchemy expression: SQLite uses a partial index only if the query repeats the index's condition
word for word, and an expression would add table names.
"""
# For the query of open groups when the hub starts. Few groups are open.
Index("ix_groups_open", groups.c.group_id, **only_where(IS_OPEN))

rollouts = Table(
    "rollouts",
    metadata,
    Column("lease_id", BigInteger, primary_key=True, autoincrement=False),
    Column("index", Integer, primary_key=True, autoincrement=False),
    Column("node_id", String(64), nullable=False),
    Column("group_id", BigInteger, nullable=False),
    Column("turn", Integer, nullable=False, server_default="0"),
    Column("policy_version", BigInteger, nullable=False),
    Column("leased_at", Double, nullable=False),
    Column("deadline", Double, nullable=False),
    Column("state", String(16), nullable=False),
    Column("drop_reason", String(16)),
    Column("detail", Text),
    Column("reward", Double),
    Column("components", JSON(none_as_null=True)),
    Column("turn_reward", Double),
    Column("num_tokens", Integer),
    Column("received_at", Double),
    Column("checked", String(8), nullable=False, server_default="no"),
    Column("scored_at", Double),
    Column("final_at", Double),
    Column("not_kept", String(8)),
    Index("ix_rollouts_group", "group_id"),
    Index("ix_rollouts_node", "node_id", "lease_id", "index"),
    Index("ix_rollouts_version", "policy_version", "lease_id", "index"),
    sqlite_with_rowid=False,
)
IS_CHECKED = text("checked <> 'no'")
"""A text, because SQLite uses a partial index only if the query repeats the index's condition word for word.
`IS_UNFINISHED` is a text for the same reason.
"""
IS_UNFINISHED = text("state IN ('leased', 'received', 'scored')")
Index("ix_rollouts_unfinished", rollouts.c.state, rollouts.c.node_id, **only_where(IS_UNFINISHED))
_NEWEST = (rollouts.c.lease_id, rollouts.c.index)
# For an operator's search among all rollouts, newest first.
Index("ix_rollouts_dropped", rollouts.c.drop_reason, *_NEWEST, **only_where(rollouts.c.drop_reason.is_not(None)))
Index("ix_rollouts_checked", rollouts.c.checked, *_NEWEST, **only_where(IS_CHECKED))

payloads = Table(
    "payloads",
    metadata,
    Column("lease_id", BigInteger, primary_key=True, autoincrement=False),
    Column("index", Integer, primary_key=True, autoincrement=False),
    *columns(),
)

kept = Table(
    "kept",
    metadata,
    Column("lease_id", BigInteger, primary_key=True, autoincrement=False),
    Column("index", Integer, primary_key=True, autoincrement=False),
    *columns(),
    Column("size_bytes", Integer, nullable=False),
)

keeping_tallies = Table(
    "keeping_tallies",
    metadata,
    Column("outcome", String(8), primary_key=True),
    Column("rollouts", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
)

old_receipts = Table(
    "old_receipts",
    metadata,
    Column("block", BigInteger, primary_key=True, autoincrement=False),
    Column("receipts", LargeBinary, nullable=False),
)

WITH_PAYLOAD = and_(payloads.c.lease_id == rollouts.c.lease_id, payloads.c.index == rollouts.c.index)

steps = Table(
    "steps",
    metadata,
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("group_ids", JSON, nullable=False),
    Column("rollout_ids", JSON, nullable=False),
    Column("staleness", JSON, nullable=False),
    Column("num_groups", Integer, nullable=False),
    Column("num_rollouts", Integer, nullable=False),
    Column("num_tokens", BigInteger, nullable=False),
    Column("mean_reward", Double, nullable=False),
    Column("components", JSON(none_as_null=True)),
    Column("planned_at", Double, nullable=False),
    Column("trained_at", Double),
    Column("metrics", JSON),
    Column("dropped", JSON),
    Column("by_task", JSON(none_as_null=True)),
    Column("pruned", Boolean, nullable=False),
)
# For the query of steps with kept tokens: the few steps that the learner may have to repeat.
Index("ix_steps_kept", steps.c.step, **only_where(steps.c.pruned.is_(False)))

uncounted = Table(
    "uncounted",
    metadata,
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("lease_ids", JSON, nullable=False),
    Column("drawn_by_several", JSON, nullable=False),
    Column("at", Double, nullable=False),
)

versions = Table(
    "versions",
    metadata,
    Column("policy_version", BigInteger, primary_key=True, autoincrement=False),
    Column("published_at", Double, nullable=False),
    Column("payload_bytes", BigInteger),
    Column("carrier", String(16)),
    Column("way", String(16)),
    Column("arrived_p50_s", Double),
    Column("arrived_p95_s", Double),
    Column("arrived_max_s", Double),
)

fetches = Table(
    "fetches",
    metadata,
    Column("node_id", String(64), primary_key=True),
    Column("info_hash", String(40), primary_key=True),
    Column("policy_version", BigInteger),
    Column("seconds", Double, nullable=False),
    Column("swarm_bytes", BigInteger, nullable=False),
    Column("web_seed_bytes", BigInteger, nullable=False),
    Column("shared_memory_bytes", BigInteger, nullable=False, server_default="0"),
    Column("fetched_at", Double, nullable=False),
    Column("pushed_bytes", BigInteger, nullable=False, server_default="0"),
    Column("mesh_bytes", BigInteger, nullable=False, server_default="0"),
    Column("model_hub_bytes", BigInteger, nullable=False, server_default="0"),
    Column("broadcast_s", Double),
    # Gives a version's arrivals in order of time, so that the database counts percentiles inside the index.
    Index("ix_fetches_version", "policy_version", "broadcast_s"),
)

tallies = Table(
    "tallies",
    metadata,
    Column("node_id", String(64), primary_key=True),
    Column("outcome", String(16), primary_key=True),
    Column("rollouts", BigInteger, nullable=False),
    Column("received", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    # A covering index for sums over nodes, which pages read every second.
    Index("ix_tallies_outcome", "outcome", "node_id", "rollouts"),
)

costs = Table(
    "costs",
    metadata,
    Column("node_id", String(64), primary_key=True),
    Column("active_s", Double, nullable=False),
    Column("dollars", Double, nullable=False),
)

checking = Table(
    "checking",
    metadata,
    Column("node_id", String(64), primary_key=True),
    Column("rollouts", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
)

outcome_tallies = Table(
    "outcome_tallies",
    metadata,
    Column("outcome", String(16), primary_key=True),
    Column("rollouts", BigInteger, nullable=False),
)

fetch_tallies = Table(
    "fetch_tallies",
    metadata,
    Column("transport", String(16), primary_key=True),
    Column("fetches", BigInteger, nullable=False),
)

version_tallies = Table(
    "version_tallies",
    metadata,
    Column("policy_version", BigInteger, primary_key=True, autoincrement=False),
    Column("transport", String(16), primary_key=True),
    Column("fetches", BigInteger, nullable=False),
    Column("swarm_bytes", BigInteger, nullable=False),
    Column("web_seed_bytes", BigInteger, nullable=False),
    Column("shared_memory_bytes", BigInteger, nullable=False),
    Column("pushed_bytes", BigInteger, nullable=False),
    Column("mesh_bytes", BigInteger, nullable=False),
)

trust = Table(
    "trust",
    metadata,
    Column("node_id", String(64), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("numerics", JSON, nullable=False),
    Column("num_verified", BigInteger, nullable=False),
    Column("sums", JSON, nullable=False),
    Column("proof", Double, nullable=False),
    Column("shown", JSON, nullable=False),
    Column("num_checked", BigInteger, nullable=False),
    Column("num_failed", BigInteger, nullable=False),
    Column("checked_at", Double),
    Column("reason", Text, nullable=False),
    Column("since", Double, nullable=False),
    Column("pardon_wanted_at", Double),
)
# For the hub's query of wanted pardons, which it makes every second.
Index("ix_trust_pardons", trust.c.pardon_wanted_at, **only_where(trust.c.pardon_wanted_at.is_not(None)))

trust_log = Table(
    "trust_log",
    metadata,
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("decided_at", Double, nullable=False),
    Column("node_id", String(64), nullable=False, index=True),
    Column("decision", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("rollout_id", String(64), nullable=False),
    Column("evidence", JSON(none_as_null=True)),
)

evaluations = Table(
    "evaluations",
    metadata,
    Column("policy_version", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String(16), primary_key=True),
    Column("num_problems", Integer, nullable=False),
    Column("samples", Integer, nullable=False),
    Column("num_unscored", Integer, nullable=False),
    Column("accuracy", Double, nullable=False),
    Column("accuracy_error", Double, nullable=False),
    Column("pass_at", JSON, nullable=False),
    Column("mean_reward", Double, nullable=False),
    Column("components", JSON(none_as_null=True)),
    Column("mean_tokens", Double, nullable=False),
    Column("share_truncated", Double, nullable=False),
    Column("seconds", Double, nullable=False),
    Column("evaluated_at", Double, nullable=False, index=True),
)

set_evaluations = Table(
    "set_evaluations",
    metadata,
    Column("policy_version", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String(16), primary_key=True),
    Column("name", String(40), primary_key=True),
    Column("num_problems", Integer, nullable=False),
    Column("samples", Integer, nullable=False),
    Column("num_unscored", Integer, nullable=False),
    Column("accuracy", Double, nullable=False),
    Column("accuracy_error", Double, nullable=False),
    Column("pass_at", JSON, nullable=False),
    Column("mean_reward", Double, nullable=False),
    Column("mean_tokens", Double, nullable=False),
    Column("share_truncated", Double, nullable=False),
    Column("seconds", Double, nullable=False),
    Column("evaluated_at", Double, nullable=False, index=True),
    Column("components", JSON(none_as_null=True)),
)

credit = Table(
    "credit",
    metadata,
    Column("holder", String(80), primary_key=True),
    Column("kind", String(8), nullable=False),
    Column("rollouts", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("steps", BigInteger, nullable=False),
    Column("recent", Double),
    Column("streak_days", Integer, nullable=False),
    Column("longest_streak", Integer, nullable=False),
    Column("first_day", Integer),
    Column("last_day", Integer),
    Column("elsewhere_rollouts", BigInteger, nullable=False),
    Column("elsewhere_tokens", BigInteger, nullable=False),
    Index("ix_credit_rollouts", "kind", "rollouts"),
)

credit_days = Table(
    "credit_days",
    metadata,
    Column("holder", String(80), primary_key=True),
    Column("day", Integer, primary_key=True, autoincrement=False),
    Column("rollouts", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

credit_steps = Table(
    "credit_steps",
    metadata,
    Column("holder", String(80), primary_key=True),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("rollouts", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

runs_elsewhere = Table(
    "runs_elsewhere",
    metadata,
    Column("run_id", String(64), primary_key=True),
    Column("run_name", String(64), nullable=False),
    Column("hub_key", String(64), nullable=False),
    Column("issued_at", String(20), nullable=False),
    Column("imported_at", Double, nullable=False),
)

credit_elsewhere = Table(
    "credit_elsewhere",
    metadata,
    Column("run_id", String(64), primary_key=True),
    Column("node_id", String(64), primary_key=True),
    Column("node_name", String(64), nullable=False),
    Column("rollouts", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Index("ix_credit_elsewhere_node", "node_id"),
)

teams = Table(
    "teams",
    metadata,
    Column("team_id", Integer, primary_key=True, autoincrement=True),
    Column("name", String(40), nullable=False),
    Column("name_key", String(160), nullable=False, unique=True),
    Column("founder", String(64), nullable=False),
    Column("founded_at", Double, nullable=False),
)

team_members = Table(
    "team_members",
    metadata,
    Column("node_id", String(64), primary_key=True),
    Column("team_id", Integer, nullable=False, index=True),
    Column("joined_at", Double, nullable=False),
)

owners = Table("owners", metadata, Column("owner_key", String(64), primary_key=True))

events = Table(
    "events",
    metadata,
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("severity", String(8), nullable=False),
    Column("subject", String(64), nullable=False),
    Column("text", Text, nullable=False),
    Column("data", JSON, nullable=False),
    Index("ix_events_kind", "kind", "number"),
    Index("ix_events_subject", "subject", "number"),
)

actions = Table(
    "actions",
    metadata,
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("asked_at", Double, nullable=False),
    Column("via", String(8), nullable=False),
    Column("who", String(128), nullable=False),
    Column("action", String(32), nullable=False),
    Column("request", JSON, nullable=False),
    Column("undoes", BigInteger, index=True),
    Column("outcome", String(8), nullable=False),
    Column("settled_at", Double),
    Column("before", JSON(none_as_null=True)),
    Column("after", JSON(none_as_null=True)),
    Column("detail", Text, nullable=False),
)
# For the hub's query of wanted actions, which it makes every second.
Index("ix_actions_wanted", actions.c.number, **only_where(text("outcome = 'wanted'")))

live_settings = Table(
    "live_settings",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("value", JSON, nullable=False),
)

api_tokens = Table(
    "api_tokens",
    metadata,
    Column("token_id", Integer, primary_key=True, autoincrement=True),
    Column("name", String(64), nullable=False),
    Column("scope", String(8), nullable=False),
    Column("token_hash", String(64), nullable=False, unique=True),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("revoked_at", Double),
)
