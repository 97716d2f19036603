"""A user's task whose scorer fails on some completions: training and evaluation must leave out only these."""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)

ODD = '''
"""Sums, judged by a scorer that returns no reward for one completion in four."""
import zlib

from echo_hub.tasks.arithmetic import make_arithmetic

ODD = [float("nan"), float("inf"), 1e30, "1"]


class Odd:
    name = "odd"

    def __init__(self):
        self._sums = make_arithmetic({})

    def sample(self, seed):
        return self._sums.sample(seed)

    def score(self, problem, completion):
        luck = zlib.crc32(completion.encode()) % 16
        return ODD[luck] if luck < len(ODD) else self._sums.score(problem, completion) == 1.0


def make(options):
    return Odd()
'''


async def finished_run(site: Any, until: Any, mode: str) -> Path:
    task, bfloat16 = {"name": "python:odd_task:make"}, {"precision": "bfloat16"}
    run: Path = await site.make_run(mode, "--mode", mode, "--seed", "7", task=task, dissemination=bfloat16)
    hub, url = await site.hub(run)
    if mode == "sequential":
        await site.node(url, "volunteer", backend="torch")
    view = await until(url, lambda view: view["state"] == "finished")
    books = view["accounting"]
    assert books["leased"] == books["trained"] + books["evaluated"] + sum(books["dropped"].values())
    assert books["dropped"]["scorer_failed"] > 0
    status, said = await hub.end()
    assert status == 0, said
    return run


def consumed(database: sqlite3.Connection) -> list[tuple[int, int, int, bytes, float]]:
    """Return every trained rollout: step, group, index, tokens, reward."""
    return database.execute(
        """SELECT groups.step, rollouts.group_id, rollouts."index", payloads.completion_ids, rollouts.reward
           FROM rollouts JOIN groups USING (group_id) JOIN payloads USING (lease_id, "index")
           WHERE rollouts.state = 'trained' ORDER BY groups.step, rollouts.group_id, rollouts."index" """
    ).fetchall()


@pytest.mark.slow
async def test_rollouts_the_scorer_fails_on_are_resampled_equally_by_hub_and_node(
    site: Any,
    until: Any,
    books: Callable[[Path], sqlite3.Connection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (site.root / "odd_task.py").write_text(ODD)
    monkeypatch.setenv("PYTHONPATH", str(site.root), prepend=os.pathsep)
    runs = []
    for mode in ("colocated", "sequential"):
        database = books(await finished_run(site, until, mode))
        runs.append(consumed(database))
        evaluations = database.execute("SELECT num_unscored, accuracy, mean_reward FROM evaluations").fetchall()
        assert len(evaluations) == 2 and sum(row[0] for row in evaluations) > 0
        assert all(math.isfinite(figure) and 0.0 <= figure <= 1.0 for row in evaluations for figure in row[1:])
        redrawn = database.execute(
            """SELECT count(*) FROM rollouts AS failed JOIN rollouts AS good USING (group_id, "index")
               WHERE failed.drop_reason = 'scorer_failed' AND good.state = 'trained'"""
        ).fetchone()[0]
        assert redrawn > 0, "resampled rollouts are trained"
        drawn_by = {node_id for (node_id,) in database.execute("SELECT DISTINCT node_id FROM rollouts")}
        assert (drawn_by == {"hub"}) == (mode == "colocated")
    assert runs[0] == runs[1]
    assert len(runs[0]) == 4 * 8 * 4 and {row[4] for row in runs[0]} == {0.0, 1.0}
