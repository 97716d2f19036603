from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from benchmarks.harness.books import Amount, fill
from echo_hub.store.board import read_board
from echo_hub.store.reports import read_accounting, read_leaderboard, read_newest_step, read_num_nodes, read_steps
from echo_hub.store.store import Store
from echo_hub.store.unfinished import read_snapshot
from echo_shared.records.credit import BoardQuery

NOW = 1_780_000_000.0
SHORT_RUN = """
INSERT INTO nodes (node_id, public_key, name, backend, device, first_seen, last_seen)
    VALUES ('real', 'real', 'real', 'torch', 'cpu', 1, 2);
INSERT INTO groups (group_id, seed, opened_at, step) VALUES (4, 1, 1, 1);
INSERT INTO rollouts (lease_id, [index], node_id, group_id, policy_version, leased_at, deadline, state)
    VALUES (9, 0, 'real', 4, 0, 1, 2, 'trained');
INSERT INTO tallies VALUES ('real', 'trained', 1, 1, 5);
INSERT INTO outcome_tallies VALUES ('trained', 1);
INSERT INTO steps (step, group_ids, rollout_ids, staleness, num_groups, num_rollouts, num_tokens, mean_reward,
    planned_at, trained_at, metrics, pruned) VALUES (3, '[4]', '["9-0"]', '[0]', 1, 1, 5, 0.5, 1, 2, '{}', 1);
INSERT INTO versions (policy_version, published_at) VALUES (3, 2);
"""


@contextmanager
def filled(directory: Path, *, seed: int, amount: Amount, short_run: str = SHORT_RUN) -> Iterator[Store]:
    directory.mkdir()
    store = Store.open(f"sqlite:///{directory / 'echo.db'}")
    with closing(sqlite3.connect(directory / "echo.db")) as books, books:
        books.executescript(short_run)
    fill(store.engine, amount, seed=seed, now=NOW)
    yield store
    store.close()


def test_after_a_run_the_accounts_balance_and_no_work_is_left(tmp_path: Path) -> None:
    with filled(tmp_path / "one", seed=1, amount=Amount(nodes=40, rollouts=2_003)) as store:
        accounting = store.read(read_accounting)
        assert accounting.balanced and accounting.in_flight == 0
        assert accounting.leased == 2_004 and accounting.num_dropped > 50
        assert store.read(read_num_nodes).known == 41
        snapshot = store.read(read_snapshot)
        assert (snapshot.rollouts, snapshot.groups, snapshot.planned) == ((), (), ())
        assert (snapshot.next_lease_id, snapshot.trained_steps) == (10 + -(-2_003 // 2), 3)
        (version,) = store.versions_history(9)
        assert sum(version.fetches_by_transport.values()) == 40 and version.dissemination_max_s is not None
        assert {row.standing for row in store.read(read_leaderboard)} == {"proven", "new", ""}


def test_an_empty_run_is_given_steps_versions_and_work_under_way(tmp_path: Path) -> None:
    amount = Amount(nodes=20, rollouts=4_096, groups_per_step=4, under_way=48)
    with filled(tmp_path / "one", seed=1, amount=amount, short_run="") as store:
        accounting, snapshot, newest = (
            store.read(read_accounting),
            store.read(read_snapshot),
            store.read(read_newest_step),
        )
        assert accounting.balanced and (accounting.leased, accounting.in_flight) == (4_144, 48)
        assert (snapshot.trained_steps, snapshot.published_version, len(snapshot.groups)) == (128, 128, 6)
        assert [row.state for row in snapshot.rollouts[::8]] == ["leased", "received", "scored"] * 2
        assert newest is not None and newest.num_rollouts > 20 and newest.figures["train_s"]
        trained = sum(step.num_rollouts for step in store.read(read_steps))
        board = store.read(read_board, BoardQuery(limit=50), NOW)
        assert trained == accounting.trained == sum(row.rollouts for row in board.rows)
        assert board.rows[0].rollouts > 3 * board.rows[9].rollouts and board.rows[0].recent > 0
        spread = {
            version.policy_version: sum(version.fetches_by_transport.values()) for version in store.versions_history(99)
        }
        assert spread[128] == spread[60] == 20


@pytest.mark.parametrize("short_run", [SHORT_RUN, ""])
def test_the_same_seed_gives_the_same_books(tmp_path: Path, short_run: str) -> None:
    found = []
    for name, seed in (("one", 1), ("two", 1), ("three", 2)):
        amount = Amount(nodes=40, rollouts=2_003, under_way=16)
        with filled(tmp_path / name, seed=seed, amount=amount, short_run=short_run) as store:
            found.append([(row.node_id, row.trained_tokens) for row in store.read(read_leaderboard)])
    assert found[0] == found[1] != found[2]
