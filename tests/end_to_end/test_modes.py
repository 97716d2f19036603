"""A sequential run with a node of its own consumes what a co-located run with the same seed consumes.

With policies in float32; in bfloat16, and where the scorer fails: `test_odd_scorers`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.timeout(600)


async def finished_run(site: Any, until: Any, mode: str) -> Path:
    run: Path = await site.make_run(mode, "--mode", mode, "--seed", "7", dissemination={"precision": "float32"})
    hub, url = await site.hub(run)
    if mode == "sequential":
        await site.node(url, "volunteer")
    await until(url, lambda view: view["state"] == "finished")
    status, said = await hub.end()
    assert status == 0, said
    return run


def consumed(database: sqlite3.Connection) -> list[tuple[int, int, int, bytes, float]]:
    """Every trained rollout: step, group, index, its tokens, its reward; in the order of training."""
    return database.execute(
        """SELECT groups.step, rollouts.group_id, rollouts."index", payloads.completion_ids, rollouts.reward
           FROM rollouts JOIN groups USING (group_id) JOIN payloads USING (lease_id, "index")
           WHERE rollouts.state = 'trained' ORDER BY groups.step, rollouts.group_id, rollouts."index" """
    ).fetchall()


@pytest.mark.slow
async def test_sequential_consumes_the_same_rollouts_as_colocated(
    site: Any, until: Any, books: Callable[[Path], sqlite3.Connection]
) -> None:
    colocated = books(await finished_run(site, until, "colocated"))
    sequential = books(await finished_run(site, until, "sequential"))
    expected, got = consumed(colocated), consumed(sequential)
    assert len(expected) == 4 * 8 * 4
    assert [(step, group, index) for step, group, index, _, _ in got] == [row[:3] for row in expected]
    assert [tokens for _, _, _, tokens, _ in got] == [row[3] for row in expected]
    rewards = "SELECT step, mean_reward FROM steps ORDER BY step"
    assert sequential.execute(rewards).fetchall() == colocated.execute(rewards).fetchall()
    assert len(np.unique([row[4] for row in expected])) > 1, "all rewards equal: the comparison shows nothing"
    assert sequential.execute("SELECT DISTINCT node_id FROM rollouts").fetchone() != ("hub",)
