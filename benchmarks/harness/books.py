"""Fill the database of a run, in seconds, with thousands of nodes and a million rollouts, by SQL statements.

A run with trained steps gets past rollouts in final states. The hub has no work with these rollouts, so it continues as
before. A run without steps gets steps, versions, and rollouts that are still in progress. The number of a node's
rollouts follows Zipf's law. The same seed gives the same rows.

Random numbers are Weyl sequences: number n is the fractional part of n times a multiplier. Such numbers are uniform
between 0 and 1, and identical in SQLite, PostgreSQL and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Engine, func, insert, select, text

from echo_hub.core.evaluation_groups import FIRST_EVALUATION_ID
from echo_hub.store.credit import RUN
from echo_hub.store.database import open_to_write
from echo_hub.store.old_fetches import KEPT_VERSIONS
from echo_hub.store.tables import (
    groups,
    nodes,
    payloads,
    rollouts,
    steps,
    trust,
    versions,
)
from echo_shared.records.step_figures import STEP_FIGURES

GROUP_SIZE: Final = 8
LEASE_SIZE: Final = 2
DAYS: Final = 30
DEVICES: Final = ("AMD Ryzen 7 7840U", "NVIDIA GeForce RTX 4070", "Apple M3 Pro", "Intel Core i5-8250U")
DROPS: Final = ("stale", "expired", "duplicate", "no_advantage")
SHARE_DROPPED: Final = 0.08
BYTES: Final = 430_112
TOKENS_UNDER_WAY: Final = 6

_MODULUS: Final = 2_147_483_647
_MULTIPLIERS: Final = {
    "node": 1_327_217_885,
    "drop": 950_706_377,
    "why": 741_103_597,
    "reward": 1_594_275_221,
    "tokens": 466_923_571,
    "check": 1_203_456_791,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    nodes: int
    rollouts: int
    groups_per_step: int = 64
    """Groups per step. Used only for a run without trained steps."""
    under_way: int = 0
    """Number of rollouts in progress: a third each is leased, received and scored. Used only for a run without
    steps.
    """


def fill(engine: Engine, amount: Amount, *, seed: int, now: float) -> None:
    """Write this amount of nodes and rollouts into the database of a hub that is not running."""
    with open_to_write(engine) as connection:
        books = _Books(connection, amount, seed=seed, now=now)
        books.write_nodes()
        books.write_rollouts()
        books.write_totals()
        if books.trained is None:
            books.write_steps()
            books.write_under_way()
        books.write_fetches()
    with engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("ANALYZE"))


def _draw(name: str, count: str) -> str:
    """Return an SQL expression for the random number (0 to 1) at index `count`, itself an SQL expression."""
    return f"((CAST({count} AS BIGINT) * {_MULTIPLIERS[name]}) % {_MODULUS} / {_MODULUS}.0)"


def _drawn(name: str, count: NDArray[np.int64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = (count * _MULTIPLIERS[name]) % _MODULUS / float(_MODULUS)
    return found


def _numbers(first: str, end: str) -> str:
    return (
        f"WITH RECURSIVE numbers(n) AS (SELECT CAST({first} AS BIGINT) UNION ALL"
        f" SELECT n + 1 FROM numbers WHERE n + 1 < {end}) "
    )


_COLUMNS: Final = (
    'lease_id, "index", node_id, group_id, turn, policy_version, leased_at, deadline, state, drop_reason, reward,'
    " num_tokens, received_at, checked, scored_at, final_at, not_kept"
)
_ZIPF: Final = f"power(CAST(:nodes AS DOUBLE PRECISION), {_draw('node', f':seed + n / {LEASE_SIZE}')})"
"""SQL expression that draws the rank of a rollout's node by Zipf's law. Rounded down, its value is r with a probability
proportional to log(1 + 1 / r).
"""
_DROP: Final = (
    f"CASE WHEN {_draw('drop', ':seed + n')} < {SHARE_DROPPED}"
    f" THEN CASE CAST(floor({len(DROPS)} * {_draw('why', ':seed + n')}) AS BIGINT) "
    + " ".join(f"WHEN {place} THEN '{reason}'" for place, reason in enumerate(DROPS))
    + " END END"
)
DRAWN: Final = (
    f"CREATE TEMPORARY TABLE drawn AS {_numbers('0', ':rollouts')} SELECT n, CAST(floor({_ZIPF}) AS BIGINT) AS place,"
    f" {_DROP} AS why, :began + n * :pause AS at, :step + n / {GROUP_SIZE} / :groups_a_step AS step,"
    f" CAST(1 + floor(6 * {_draw('tokens', ':seed + n')}) AS BIGINT) AS tokens FROM numbers"
)
_REWARD: Final = f"floor(2 * {_draw('reward', ':seed + n')})"
_CAME: Final = "CASE WHEN why = 'expired' THEN NULL ELSE {0} END"
ROLLOUTS: Final = (
    f"INSERT INTO rollouts ({_COLUMNS}) SELECT :lease + n / {LEASE_SIZE}, n % {GROUP_SIZE}, node_id,"
    f" :grp + n / {GROUP_SIZE}, 0, CASE WHEN step > 2 THEN step - 2 ELSE 0 END, at, at + 60.0,"
    " CASE WHEN why IS NULL THEN 'trained' ELSE 'dropped' END, why,"
    f" {_CAME.format(_REWARD)}, {_CAME.format('tokens')},"
    f" {_CAME.format('at + 2.0')}, CASE WHEN {_draw('check', ':seed + n')} < 0.05 THEN 'passed' ELSE 'no' END,"
    f" {_CAME.format('at + 3.0')}, at + 9.0, 'bytes' FROM drawn JOIN ranks ON ranks.place = drawn.place ORDER BY n"
)
GROUPS: Final = (
    f"INSERT INTO groups (group_id, seed, opened_at, step) {_numbers('0', ':groups')}"
    f"SELECT :grp + n, n, :began + n * {GROUP_SIZE} * :pause, :step + n / :groups_a_step FROM numbers"
)
COUNTED: Final = (
    "CREATE TEMPORARY TABLE counted AS SELECT node_id, outcome, step, day, rollouts, received, tokens FROM (SELECT"
    " place, coalesce(why, 'trained') AS outcome, step, CAST(floor((at + 9.0) / 86400.0) AS INTEGER) AS day,"
    f" count(*) AS rollouts, count({_CAME.format('1')}) AS received, coalesce(sum({_CAME.format('tokens')}), 0) AS"
    " tokens FROM drawn GROUP BY 1, 2, 3, 4) AS sums JOIN ranks ON ranks.place = sums.place"
)
TALLIES: Final = (
    "INSERT INTO tallies (node_id, outcome, rollouts, received, tokens) SELECT node_id, outcome, sum(rollouts),"
    " sum(received), sum(tokens) FROM counted GROUP BY 1, 2"
)
OUTCOMES: Final = (
    "INSERT INTO outcome_tallies (outcome, rollouts) SELECT outcome, sum(rollouts) FROM counted WHERE true GROUP BY 1"
    " ON CONFLICT (outcome) DO UPDATE SET rollouts = outcome_tallies.rollouts + excluded.rollouts"
)
_PARTS: Final = (
    "INSERT INTO credit_{0}s (holder, {0}, rollouts, tokens) SELECT {1}, {0}, sum(rollouts), sum(tokens) FROM counted"
    " WHERE outcome = 'trained' GROUP BY 1, 2 ON CONFLICT (holder, {0}) DO UPDATE SET"
    " rollouts = credit_{0}s.rollouts + excluded.rollouts, tokens = credit_{0}s.tokens + excluded.tokens"
)
PARTS: Final = tuple(_PARTS.format(part, holder) for part in ("day", "step") for holder in ("node_id", f"'{RUN}'"))
CREDIT: Final = (
    "INSERT INTO credit (holder, kind, rollouts, tokens, steps, recent, streak_days, longest_streak, first_day,"
    " last_day, elsewhere_rollouts, elsewhere_tokens)"
    " SELECT holder, CASE holder WHEN '/run' THEN 'run' ELSE 'node' END,"
    " sum(rollouts), sum(tokens), (SELECT count(*) FROM credit_steps WHERE credit_steps.holder = credit_days.holder),"
    " log(2.0, CAST(sum(tokens) AS NUMERIC)) + (max(day) + 1) / 7.0, 1, 1, min(day), max(day), 0, 0"
    " FROM credit_days WHERE true GROUP BY holder"
    " ON CONFLICT (holder) DO UPDATE SET rollouts = excluded.rollouts, tokens = excluded.tokens"
)
FETCHED: Final = (
    "INSERT INTO version_tallies (policy_version, transport, fetches, swarm_bytes, web_seed_bytes,"
    " shared_memory_bytes, pushed_bytes, mesh_bytes) SELECT policy_version, 'broadcast', :nodes, 0, 0, 0,"
    " CAST(:nodes AS BIGINT) * :bytes / 4, CAST(:nodes AS BIGINT) * :bytes * 3 / 4"
    " FROM versions WHERE policy_version > 0"
    " ON CONFLICT (policy_version, transport) DO UPDATE SET fetches = version_tallies.fetches + excluded.fetches"
)
FETCH_TALLY: Final = (
    "INSERT INTO fetch_tallies (transport, fetches) SELECT 'broadcast', count(*) * :nodes FROM versions"
    " WHERE policy_version > 0"
    " ON CONFLICT (transport) DO UPDATE SET fetches = fetch_tallies.fetches + excluded.fetches"
)
FETCHES: Final = (
    "INSERT INTO fetches (node_id, info_hash, policy_version, seconds, swarm_bytes, web_seed_bytes, fetched_at,"
    " pushed_bytes, mesh_bytes, broadcast_s) SELECT node_id, {hash}, policy_version, took, 0, 0, published_at + took,"
    " CAST(:bytes AS BIGINT) / 4, CAST(:bytes AS BIGINT) * 3 / 4, took FROM (SELECT node_id, policy_version,"
    f" published_at, 0.2 + 4 * {_draw('node', 'place * 97 + policy_version')} AS took FROM versions CROSS JOIN ranks"
    " WHERE policy_version > :oldest) AS of_newest"
)


class _Books:
    """Writes the rows through one connection. `trained` is the run's newest step; None for a run without steps."""

    def __init__(self, connection: Connection, amount: Amount, *, seed: int, now: float) -> None:
        self._connection = connection
        self._amount = amount
        self._rng = np.random.default_rng(seed)
        self._seed = seed % 1_000 * 1_000_003
        self._now = now
        self._began_at = now - DAYS * 86_400
        self.trained: int | None = connection.scalar(
            select(func.max(steps.c.step)).where(steps.c.trained_at.is_not(None))
        )
        newest_group = select(func.max(groups.c.group_id)).where(groups.c.group_id < FIRST_EVALUATION_ID)
        self._lease = (connection.scalar(select(func.max(rollouts.c.lease_id))) or 0) + 1
        group = connection.scalar(newest_group)
        self._group = 0 if group is None else group + 1
        self._ids: list[str] = []

    @property
    def _num_groups(self) -> int:
        return -(-self._amount.rollouts // GROUP_SIZE)

    @property
    def _groups_a_step(self) -> int:
        """Return the number of groups per step. In a trained run, all groups belong to the newest step."""
        return self._amount.groups_per_step if self.trained is None else self._num_groups

    @property
    def _num_steps(self) -> int:
        return -(-self._num_groups // self._groups_a_step)

    def _do(self, statement: str, **values: Any) -> None:
        known = {
            "seed": self._seed,
            "nodes": self._amount.nodes,
            "rollouts": self._amount.rollouts,
            "groups": self._num_groups,
            "groups_a_step": self._groups_a_step,
            "lease": self._lease,
            "grp": self._group,
            "step": self.trained or 1,
            "began": self._began_at,
            "pause": (DAYS * 86_400 - 3_600) / self._amount.rollouts,
            "bytes": BYTES,
            **values,
        }
        wanted = text(statement)
        self._connection.execute(wanted, {name: known[name] for name in wanted._bindparams})

    def write_nodes(self) -> None:
        self._ids = [self._rng.bytes(32).hex() for _ in range(self._amount.nodes)]
        self._connection.execute(text("CREATE TEMPORARY TABLE ranks (place BIGINT PRIMARY KEY, node_id TEXT)"))
        # The node of the lowest place gets the most rollouts (Zipf's law).
        ranks = [{"place": place + 1, "node_id": node_id} for place, node_id in enumerate(self._ids)]
        self._connection.execute(text("INSERT INTO ranks VALUES (:place, :node_id)"), ranks)
        seen = self._now - self._rng.exponential(2 * 86_400, len(self._ids))
        self._connection.execute(
            insert(nodes),
            [
                {
                    "node_id": node_id,
                    "public_key": node_id,
                    "name": f"machine-{number}",
                    "backend": ("llama_cpp", "torch", "mlx")[number % 3],
                    "device": DEVICES[number % len(DEVICES)],
                    "first_seen": self._began_at,
                    "last_seen": float(max(seen[number], self._began_at)),
                }
                for number, node_id in enumerate(self._ids)
            ],
        )

    def write_rollouts(self) -> None:
        """Write groups and rollouts. Indices are dropped and rebuilt, because updating them takes much longer."""
        self._do(DRAWN)
        self._do(GROUPS)
        for index in rollouts.indexes:
            index.drop(self._connection)
        self._do(ROLLOUTS)
        for index in rollouts.indexes:
            index.create(self._connection)

    def write_totals(self) -> None:
        for statement in (COUNTED, TALLIES, OUTCOMES, *PARTS, CREDIT):
            self._do(statement)
        standings = [
            {
                "node_id": node_id,
                "state": "proven" if checks > 20 else "new",
                "numerics": ["llama_cpp", "f16", "cpu"],
                "num_verified": checks,
                "sums": [],
                "proof": 0.0,
                "shown": {},
                "num_checked": checks,
                "num_failed": 0,
                "checked_at": self._now - 60.0 * checks,
                "reason": "",
                "since": self._began_at,
            }
            for node_id, checks in zip(self._ids, self._rng.integers(0, 60, len(self._ids)).tolist(), strict=True)
            if checks
        ]
        self._connection.execute(insert(trust), standings)

    def write_steps(self) -> None:
        published = [{"policy_version": 0, "published_at": self._began_at}]
        for step in self._steps():
            self._connection.execute(insert(steps), step)
            published.append({"policy_version": step["step"], "published_at": step["trained_at"] + 0.5})
        self._connection.execute(insert(versions), published)

    def _steps(self) -> Iterator[dict[str, Any]]:
        figures = {figure.key: 0.1234567 for figure in STEP_FIGURES}
        in_batch = self._groups_a_step * GROUP_SIZE
        pause = (DAYS * 86_400 - 3_600) / self._amount.rollouts
        for number in range(self._num_steps):
            first, end = number * in_batch, min((number + 1) * in_batch, self._amount.rollouts)
            all_n = np.arange(first, end, dtype=np.int64)
            trained = all_n[_drawn("drop", all_n + self._seed) >= SHARE_DROPPED]
            tokens = 1 + np.floor(6 * _drawn("tokens", trained + self._seed))
            group_ids = list(range(self._group + first // GROUP_SIZE, self._group + -(-end // GROUP_SIZE)))
            trained_at = self._began_at + end * pause + 9.0
            yield {
                "step": number + 1,
                "group_ids": group_ids,
                "rollout_ids": [f"{self._lease + n // LEASE_SIZE}-{n % GROUP_SIZE}" for n in trained.tolist()],
                "staleness": [2] * len(group_ids),
                "num_groups": len(group_ids),
                "num_rollouts": len(trained),
                "num_tokens": int(tokens.sum()),
                "mean_reward": float(np.floor(2 * _drawn("reward", trained + self._seed)).mean()),
                "planned_at": trained_at - 3.0,
                "trained_at": trained_at,
                "metrics": figures,
                "dropped": dict.fromkeys(DROPS, 9),
                "pruned": number < self._num_steps - 2,
            }

    def write_under_way(self) -> None:
        """Write groups whose rollouts are all in progress, node by node."""
        lease, group = self._lease + self._amount.rollouts // LEASE_SIZE + 1, self._group + self._num_groups
        count = self._amount.under_way // GROUP_SIZE * GROUP_SIZE
        if not count:
            return
        opened = [{"group_id": group + n, "seed": n, "opened_at": self._now} for n in range(count // GROUP_SIZE)]
        self._connection.execute(insert(groups), opened)
        held = [
            {
                "lease_id": lease + n // LEASE_SIZE,
                "index": n % GROUP_SIZE,
                "node_id": self._ids[n // LEASE_SIZE % len(self._ids)],
                "group_id": group + n // GROUP_SIZE,
                "policy_version": self._num_steps,
                "leased_at": self._now,
                "deadline": self._now + 600.0,
                "state": ("leased", "received", "scored")[n // GROUP_SIZE % 3],
            }
            for n in range(count)
        ]
        came_in = [row for row in held if row["state"] != "leased"]
        self._connection.execute(insert(rollouts), [row for row in held if row["state"] == "leased"])
        more = {"num_tokens": TOKENS_UNDER_WAY, "received_at": self._now}
        scored = {"reward": 1.0, "scored_at": self._now}
        nothing: dict[str, Any] = dict.fromkeys(scored)
        self._connection.execute(
            insert(rollouts), [{**row, **more, **(scored if row["state"] == "scored" else nothing)} for row in came_in]
        )
        drawn: dict[str, Any] = dict.fromkeys(("completion_ids", "behavior_logprobs"), bytes(4 * TOKENS_UNDER_WAY))
        drawn |= {"finish_reason": "stop", "sampling_s": 0.5}
        keys = ({"lease_id": row["lease_id"], "index": row["index"]} for row in came_in)
        self._connection.execute(insert(payloads), [{**key, **drawn} for key in keys])

    def write_fetches(self) -> None:
        """Write every node's fetches of the newest versions, and totals of older versions."""
        newest = self._connection.scalar(select(func.max(versions.c.policy_version))) or 0
        is_sqlite = self._connection.dialect.name == "sqlite"
        as_hash = "printf('%040x', policy_version)" if is_sqlite else "lpad(to_hex(policy_version), 40, '0')"
        self._do(FETCHES.format(hash=as_hash), oldest=newest - KEPT_VERSIONS)
        self._do(FETCHED)
        self._do(FETCH_TALLY)
        older = versions.c.policy_version <= newest - KEPT_VERSIONS
        arrived = {"arrived_p50_s": 2.0, "arrived_p95_s": 4.0, "arrived_max_s": 5.0}
        told = {"payload_bytes": BYTES, "carrier": "delta", "way": "broadcast"}
        self._connection.execute(versions.update().where(versions.c.payload_bytes.is_(None)).values(told))
        self._connection.execute(versions.update().where(older).values(arrived))
