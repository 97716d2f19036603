"""A long run's books, in a minute: thousands of nodes and a million rollouts beside what a short real run has written.

What is added is of the past and final: nothing of it is work, so the hub goes on with its run as if it had been there
all the time. Who did how much follows Zipf's law; some names are hostile. The same seed gives the same books.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np

from echo_hub.core.evaluation_groups import FIRST_EVALUATION_ID

GROUP_SIZE: Final = 8
A_PART: Final = 100_000
DAYS: Final = 30
VERSIONS: Final = 30
"""So many newest versions were fetched by every node."""
HOSTILE: Final = (
    '<script>alert("owned")</script>',
    '"><img src=x onerror=alert(1)>',
    "{{ 7 * 7 }}",
    "\u202egnp.exe\u202c",
    "W" * 64,
    "日本語のノード",
    "'; DROP TABLE nodes; --",
)
DEVICES: Final = ("AMD Ryzen 7 7840U", "NVIDIA GeForce RTX 4070", "Apple M3 Pro", "Intel Core i5-8250U")
DROPS: Final = ("stale", "expired", "duplicate", "no_advantage")
SHARE_DROPPED: Final = 0.08
NODE: Final = (
    "INSERT INTO nodes (node_id, public_key, name, backend, device, first_seen, last_seen) VALUES (?, ?, ?, ?, ?, ?, ?)"
)
GROUP: Final = "INSERT INTO groups (group_id, seed, opened_at, step) VALUES (?, ?, ?, ?)"
ROLLOUT: Final = (
    "INSERT INTO rollouts (lease_id, [index], node_id, group_id, policy_version, leased_at, deadline, state,"
    " drop_reason, reward, num_tokens, received_at, checked, scored_at, final_at, not_kept)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
TALLIES: Final = (
    "INSERT INTO tallies (node_id, outcome, rollouts, received, tokens) SELECT node_id, coalesce(drop_reason, state),"
    " count(*), count(received_at), coalesce(sum(num_tokens), 0) FROM rollouts WHERE lease_id > ? GROUP BY 1, 2"
)
OUTCOMES: Final = (
    "INSERT INTO outcome_tallies SELECT outcome, sum(rollouts) FROM tallies WHERE true GROUP BY 1"
    " ON CONFLICT (outcome) DO UPDATE SET rollouts = excluded.rollouts"
)
BYTES: Final = 430_112
"""Of a fetch."""
FETCHES: Final = (
    "INSERT INTO version_tallies VALUES (?, 'inline', ?, 0, 0, 0, ?, 0) ON CONFLICT (policy_version, transport) DO"
    " UPDATE SET fetches = fetches + excluded.fetches, pushed_bytes = pushed_bytes + excluded.pushed_bytes"
)
FETCH: Final = (
    "INSERT INTO fetches (node_id, info_hash, policy_version, seconds, swarm_bytes, web_seed_bytes, fetched_at,"
    " pushed_bytes, mesh_bytes, broadcast_s) VALUES (?, ?, ?, ?, 0, 0, ?, ?, ?, ?)"
)
TRUST: Final = (
    "INSERT INTO trust (node_id, state, numerics, num_verified, sums, proof, shown, num_checked, num_failed,"
    """ checked_at, reason, since) VALUES (?, ?, '["llama_cpp", "f16", "cpu"]', ?, '[]', 0, '{}', ?, 0, ?, '', ?)"""
)
TRAINING_GROUPS: Final = "SELECT max(group_id) FROM groups WHERE group_id < ?"


def fill(store: Path, *, nodes: int, rollouts: int, seed: int, now: float) -> None:
    """Adds that many nodes and rollouts to the SQLite file of a hub that does not run, and has trained a step."""
    rng = np.random.default_rng(seed)
    began_at = now - DAYS * 86_400
    with closing(sqlite3.connect(store)) as books, books:
        books.execute("PRAGMA synchronous = OFF")
        newest_step = books.execute("SELECT max(step) FROM steps WHERE trained_at IS NOT NULL").fetchone()[0]
        newest_lease = books.execute("SELECT max(lease_id) FROM rollouts").fetchone()[0]
        newest_group = books.execute(TRAINING_GROUPS, (FIRST_EVALUATION_ID,)).fetchone()[0]
        first = (newest_lease + 1, newest_group + 1)
        ids = [rng.bytes(32).hex() for _ in range(nodes)]
        books.executemany(NODE, _nodes(ids, rng, began_at=began_at, now=now))
        shares = 1.0 / np.arange(1, nodes + 1)
        for start in range(0, rollouts, A_PART):
            count = min(A_PART, rollouts - start)
            groups = [
                (first[1] + (start + place) // GROUP_SIZE, start + place, began_at, newest_step)
                for place in range(0, count, GROUP_SIZE)
            ]
            books.executemany(GROUP, groups)
            by = rng.choice(nodes, count, p=shares / shares.sum())
            books.executemany(
                ROLLOUT, _rollouts(rng, [ids[one] for one in by], first, start, newest_step, began_at=began_at)
            )
        books.execute(TALLIES, (newest_lease,))
        books.execute(OUTCOMES)
        newest = books.execute("SELECT policy_version FROM versions ORDER BY 1 DESC LIMIT ?", (VERSIONS,)).fetchall()
        for (version,) in newest:
            took = np.round(rng.lognormal(0.0, 0.6, nodes), 3).tolist()
            fetched = zip(ids, took, strict=True)
            books.executemany(
                FETCH, ((node_id, f"{version:040x}", version, s, now, BYTES, 0, s) for node_id, s in fetched)
            )
            books.execute(FETCHES, (version, nodes, nodes * BYTES))
        checked = zip(ids, rng.integers(0, 60, nodes).tolist(), strict=True)
        standings = (
            (node_id, "proven" if checks > 20 else "new", checks, checks, now - 60.0 * checks, began_at)
            for node_id, checks in checked
            if checks
        )
        books.executemany(TRUST, standings)
        books.execute("ANALYZE")


def _nodes(ids: list[str], rng: np.random.Generator, *, began_at: float, now: float) -> Iterator[tuple[Any, ...]]:
    seen = now - rng.exponential(2 * 86_400, len(ids))
    for number, node_id in enumerate(ids):
        name = HOSTILE[number] if number < len(HOSTILE) else f"machine-{number}"
        backend = ("llama_cpp", "torch", "mlx")[number % 3]
        device = DEVICES[number % len(DEVICES)]
        yield node_id, node_id, name, backend, device, began_at, float(max(seen[number], began_at))


def _rollouts(
    rng: np.random.Generator, by: list[str], first: tuple[int, int], start: int, step: int, *, began_at: float
) -> Iterator[tuple[Any, ...]]:
    count = len(by)
    drops = np.where(rng.random(count) < SHARE_DROPPED, rng.integers(0, len(DROPS), count), -1).tolist()
    tokens, rewards = rng.integers(1, 7, count).tolist(), rng.integers(0, 2, count).tolist()
    checks, versions = rng.random(count).tolist(), rng.integers(0, step, count).tolist()
    for place in range(count):
        number = start + place
        leased_at = began_at + number
        drop = DROPS[drops[place]] if drops[place] >= 0 else None
        came = drop != "expired"
        yield (
            *(first[0] + number // GROUP_SIZE, number % GROUP_SIZE, by[place], first[1] + number // GROUP_SIZE),
            *(versions[place], leased_at, leased_at + 60.0, "dropped" if drop else "trained", drop),
            *(
                float(rewards[place]) if came else None,
                tokens[place] if came else None,
                leased_at + 2.0 if came else None,
            ),
            *("passed" if checks[place] < 0.05 else "no", leased_at + 3.0 if came else None, leased_at + 9.0, "bytes"),
        )
