"""If the hub has no verifier, real nodes with two different engines check each other's rollouts and convict a
forger.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.hostile.engine import ATTACK, FORGED, SHARE

pytestmark = pytest.mark.timeout(600)

RUN: dict[str, dict[str, object]] = {
    "training": {"steps": 10_000, "groups_per_step": 64, "group_size": 8, "max_staleness": 16},
    "trust": {"verifier": "nodes"},
    "leases": {"deadline_s": 10.0},
    "evaluation": {"problems": 1},
}


@pytest.mark.slow
async def test_two_different_nodes_convict_a_forger(
    site: Any, until: Any, books: Callable[[Path], sqlite3.Connection]
) -> None:
    run = await site.make_run("run", "--mode", "async", **RUN)
    hub, url = await site.hub(run)
    for name, backend in (("torch", "torch"), ("llama", "llama_cpp")):
        await site.node(url, name, backend=backend)
    forged = site.root / "forged"
    forged.touch()
    hostile = {**os.environ, ATTACK: "forged digits, possible claims", SHARE: "1.0", FORGED: str(forged)}
    where = ("--data-dir", site.root / "hostile", "--name", "hostile", "--threads", "1", "--swarm-host", "127.0.0.1")
    command = (sys.executable, "-u", "-m", "benchmarks.harness.hostile.node", "join", url, "--backend", "torch")
    await site.program(*command, *where, env=hostile)
    view = await until(url, lambda view: view["trust"]["quarantined"] == 1, within_s=480.0)
    assert view["trust"]["opinions"] >= 2
    store = books(run)
    names = dict(store.execute("SELECT name, node_id FROM nodes").fetchall())
    # Honest nodes continue to work, confirm each other's rollouts and get credit for that.
    await until(url, lambda view: view["trained_step"] >= 1)
    assert store.execute("SELECT node_id, decision FROM trust_log").fetchall() == [(names["hostile"], "quarantined")]
    checked = dict(store.execute("SELECT node_id, tokens FROM checking").fetchall())
    assert checked[names["torch"]] > 0 and checked[names["llama"]] > 0
    of_it = "SELECT count(*) FROM rollouts WHERE node_id = ? AND drop_reason = 'forged' AND checked = 'failed'"
    assert store.execute(of_it, (names["hostile"],)).fetchone()[0] >= 1
    verifiers = [name for name in (run / "logs").iterdir() if name.name.startswith("verifier")]
    assert verifiers == [], "the hub itself has recomputed nothing"
    status, said = await hub.end()
    assert status == 0, said
