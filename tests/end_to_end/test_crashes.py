"""Hub, learner and node are killed in mid-run and started again: the run goes on, and the books still balance."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.timeout(900)

STEPS = 150


def learner_of(hub: Any) -> psutil.Process:
    (learner,) = [
        child for child in psutil.Process(hub.process.pid).children() if "echo_hub.learner.worker" in child.cmdline()
    ]
    return learner


def check_books(database: sqlite3.Connection) -> None:
    """Every leased rollout has one final state, and what was trained was trained in exactly one step."""
    states = Counter(dict(database.execute("SELECT state, count(*) FROM rollouts GROUP BY state").fetchall()))
    assert set(states) <= {"trained", "dropped"}, states
    unexplained = "SELECT count(*) FROM rollouts WHERE state = 'dropped' AND drop_reason IS NULL"
    assert database.execute(unexplained).fetchone() == (0,)
    steps = database.execute(
        "SELECT step, rollout_ids FROM steps WHERE trained_at IS NOT NULL ORDER BY step"
    ).fetchall()
    assert [step for step, _ in steps] == list(range(1, STEPS + 1))
    trained = Counter(rollout_id for _, ids in steps for rollout_id in json.loads(ids))
    assert set(trained.values()) == {1}
    assert len(trained) == states["trained"] == STEPS * 8 * 4


@pytest.mark.parametrize("mode", ["async", "sequential"])
async def test_a_run_survives_kill_9_of_everything(
    mode: str, site: Any, until: Any, books: Callable[[Path], sqlite3.Connection]
) -> None:
    run = await site.make_run(
        "run", "--mode", mode, training={"steps": STEPS}, learner={"checkpoint_every": 2}, leases={"deadline_s": 5.0}
    )
    hub, url = await site.hub(run)

    async def reached(step: int) -> None:
        view = await until(url, lambda view: view["trained_step"] >= step)
        assert view["trained_step"] < STEPS, "too late to kill anything"

    port = url.rpartition(":")[2]
    await site.node(url, "node-1")
    node = await site.node(url, "node-2")

    await reached(10)
    learner = learner_of(hub)
    learner.kill()

    await reached(40)
    await node.kill()
    node = await site.node(url, "node-2")

    await reached(70)
    orphan = learner_of(hub)
    await hub.kill()
    psutil.wait_procs([orphan], timeout=60)
    assert not orphan.is_running(), "a learner must end when its hub is gone"
    hub, url = await site.hub(run, "--port", port)

    view = await until(url, lambda view: view["state"] == "finished")
    assert view["accounting"]["leased"] == view["accounting"]["trained"] + sum(view["accounting"]["dropped"].values())
    check_books(books(run))
    nodes = books(run).execute("SELECT node_id, count(*) FROM rollouts WHERE state = 'trained' GROUP BY node_id")
    assert len(nodes.fetchall()) == 2, "both nodes contribute"
    assert (await hub.end())[0] == 0
