"""Hub, learner and node are killed in mid-run and started again: the run continues, and every rollout
is accounted for.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.timeout(900)

ENDLESS = {"steps": 100_000}
"""Number of training steps: more than a run makes before its processes are killed. The restarted hub gets a lower
number.
"""


def learner_of(hub: Any) -> psutil.Process:
    (learner,) = [
        child for child in psutil.Process(hub.process.pid).children() if "echo_hub.learner.serve" in child.cmdline()
    ]
    return learner


def check_books(database: sqlite3.Connection, num_steps: int) -> None:
    """Check that every leased rollout has one final state, and every trained one is in exactly one step."""
    states = Counter(dict(database.execute("SELECT state, count(*) FROM rollouts GROUP BY state").fetchall()))
    assert set(states) <= {"trained", "dropped"}, states
    unexplained = "SELECT count(*) FROM rollouts WHERE state = 'dropped' AND drop_reason IS NULL"
    assert database.execute(unexplained).fetchone() == (0,)
    steps = database.execute(
        "SELECT step, rollout_ids FROM steps WHERE trained_at IS NOT NULL ORDER BY step"
    ).fetchall()
    assert [step for step, _ in steps] == list(range(1, num_steps + 1))
    trained = Counter(rollout_id for _, ids in steps for rollout_id in json.loads(ids))
    assert set(trained.values()) == {1}
    assert len(trained) == states["trained"] == num_steps * 8 * 4


async def kill_between_checkpoint_and_commit(hub: Any, run: Path, database: sqlite3.Connection) -> int:
    """Stop the hub while its learner trains a step, let the learner write the step's checkpoint, then kill both."""
    process = psutil.Process(hub.process.pid)
    untrained = "SELECT max(step) FROM steps WHERE trained_at IS NULL"
    async with asyncio.timeout(120):
        while True:
            (step,) = database.execute(untrained).fetchone()
            if step is not None:
                process.suspend()
                for _ in range(500):
                    checkpointed = (run / "checkpoints" / f"step-{step:06d}").exists()
                    if checkpointed or database.execute(untrained).fetchone() != (step,):
                        break
                    await asyncio.sleep(0.01)
                if checkpointed and database.execute(untrained).fetchone() == (step,):
                    learner = learner_of(hub)
                    await hub.kill()
                    psutil.wait_procs([learner], timeout=60)
                    return int(step)
                process.resume()
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_a_step_that_only_a_checkpoint_knows_leaves_no_hole_in_the_curves(
    site: Any, until: Any, reached: Any, books: Callable[[Path], sqlite3.Connection]
) -> None:
    run = await site.make_run("run", training=ENDLESS, learner={"checkpoint_every": 1})
    hub, url = await site.hub(run)
    await site.node(url, "node-1")
    await reached(run, 2)
    step = await kill_between_checkpoint_and_commit(hub, run, books(run))
    site.change(run, {"training": {"steps": step + 8}})
    hub, url = await site.hub(run, "--port", url.rpartition(":")[2])
    await until(url, lambda view: view["state"] == "finished")
    trained = books(run).execute("SELECT step, metrics FROM steps WHERE trained_at IS NOT NULL ORDER BY step")
    figures = {step: json.loads(metrics) for step, metrics in trained}
    assert list(figures) == list(range(1, step + 9))
    assert figures[step].keys() - {"gap_s"} == figures[1].keys(), "the step has the learner's own figures"
    assert (await hub.end())[0] == 0


@pytest.mark.slow
async def test_a_run_in_lock_step_survives_kill_9_of_everything(
    site: Any, until: Any, reached: Any, books: Callable[[Path], sqlite3.Connection]
) -> None:
    """The run is sequential: nodes and learner take turns. `tests/benchmarks/test_chaos.py` kills the processes of an
    asynchronous run.
    """
    run = await site.make_run(
        "run",
        "--mode",
        "sequential",
        training=ENDLESS,
        learner={"checkpoint_every": 2},
        leases={"deadline_s": 5.0},
        trust={"verifier": "process"},
    )
    hub, url = await site.hub(run)
    database = books(run)
    both = "SELECT count(DISTINCT node_id) FROM rollouts WHERE state = 'trained'"
    port = url.rpartition(":")[2]
    await site.node(url, "node-1")
    node = await site.node(url, "node-2")

    await reached(run, 3)
    learner = learner_of(hub)
    learner.kill()

    await reached(run, 9)
    await reached(run, 2, both)
    await node.kill()
    node = await site.node(url, "node-2")

    await reached(run, await reached(run, 9) + 7)
    orphan = learner_of(hub)
    await hub.kill()
    psutil.wait_procs([orphan], timeout=60)
    assert not orphan.is_running(), "a learner must end after its hub"
    steps = await reached(run, 16) + 12
    site.change(run, {"training": {"steps": steps}})
    hub, url = await site.hub(run, "--port", port)

    view = await until(url, lambda view: view["state"] == "finished")
    assert view["accounting"]["leased"] == view["accounting"]["trained"] + sum(view["accounting"]["dropped"].values())
    check_books(database, steps)
    assert (await hub.end())[0] == 0
