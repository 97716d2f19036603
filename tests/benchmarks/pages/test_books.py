from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from benchmarks.pages.books import fill
from echo_hub.store.store import Store

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


def filled(directory: Path, seed: int) -> Store:
    directory.mkdir()
    url = f"sqlite:///{directory / 'echo.db'}"
    Store.open(url).close()
    with closing(sqlite3.connect(directory / "echo.db")) as books, books:
        books.executescript(SHORT_RUN)
    fill(directory / "echo.db", nodes=40, rollouts=2_003, seed=seed, now=NOW)
    return Store.open(url)


def test_the_books_add_up_and_nothing_in_them_is_work(tmp_path: Path) -> None:
    store = filled(tmp_path / "one", seed=1)
    accounting = store.accounting()
    assert accounting.balanced and accounting.in_flight == 0
    assert accounting.leased == 2_004 and accounting.num_dropped > 50
    assert store.num_nodes().known == 41
    snapshot = store.snapshot()
    assert (snapshot.rollouts, snapshot.groups, snapshot.planned) == ((), (), ())
    assert (snapshot.next_lease_id, snapshot.trained_steps) == (10 + -(-2_003 // 8), 3)
    (version,) = store.versions_history(9)
    assert sum(version.fetches_by_transport.values()) == 40 and version.dissemination_max_s is not None
    assert {row.standing for row in store.leaderboard()} == {"proven", "new", ""}
    store.close()


def test_the_same_seed_gives_the_same_books(tmp_path: Path) -> None:
    found = []
    for name, seed in (("one", 1), ("two", 1), ("three", 2)):
        store = filled(tmp_path / name, seed=seed)
        found.append([(row.node_id, row.trained_tokens) for row in store.leaderboard()])
        store.close()
    assert found[0] == found[1] != found[2]
