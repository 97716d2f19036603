"""Nodes on the hub's host read versions from the hub's shared memory; if a version is not there, from the swarm."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echo_hub.config.file import load_config
from echo_hub.net.host_memory import HostMemory
from echo_hub.run.directory import RunDirectory
from echo_hub.serving.opening import open_hub
from echo_shared.swarm import shared_memory
from echo_shared.wire.messages import SharedMemory

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not shared_memory.AVAILABLE, reason="this system or Python has no such memory"),
]
STEPS = 6
TRAINED = STEPS * 8 * 4
ON = {"shared_memory": True}
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def check_books(database: sqlite3.Connection) -> None:
    """Check that every leased rollout is trained or dropped, and that every step trained a full batch."""
    states = dict(database.execute("SELECT state, count(*) FROM rollouts GROUP BY state").fetchall())
    assert set(states) <= {"trained", "dropped"} and states["trained"] == TRAINED


def fetches_of(database: sqlite3.Connection, name: str) -> dict[int, tuple[bool, bool]]:
    """Return, for each version, two booleans: True if the node read some part from memory, and True if it fetched some
    part from the swarm.
    """
    rows = database.execute(
        """SELECT fetches.policy_version, shared_memory_bytes > 0, swarm_bytes + web_seed_bytes > 0
           FROM fetches JOIN nodes USING (node_id) WHERE fetches.policy_version IS NOT NULL AND nodes.name = ?""",
        (name,),
    )
    return {version: (bool(memory), bool(swarm)) for version, memory, swarm in rows.fetchall()}


@pytest.mark.slow
async def test_a_node_on_the_hubs_host_reads_versions_from_memory(
    site: Any, until: Any, reached: Any, books: Callable[[Path], sqlite3.Connection]
) -> None:
    """New versions must come from memory, also after the hub was killed and restarted."""
    run = await site.make_run("run", "--mode", "sequential", training={"steps": STEPS}, server=ON)
    hub, url = await site.hub(run)
    node = await site.node(url, "beside")
    assert await reached(run, 2) < STEPS
    assert set(fetches_of(books(run), "beside").values()) == {(True, False)}
    await hub.kill()
    hub, url = await site.hub(run, "--port", url.rpartition(":")[2])
    await until(url, lambda view: view["state"] == "finished")

    def in_memory() -> int:
        return Counter(fetches_of(books(run), "beside").values())[True, False]

    # The view and the database are read at different moments; the last report may arrive in between.
    await until(url, lambda view: view["fetches_by_transport"]["shared_memory"] == in_memory())
    fetched = fetches_of(books(run), "beside")
    unreported = set(range(1, STEPS)) - set(fetched)
    assert len(unreported) <= 1, "each step is sampled by the previous version; one report may die with the hub"
    ways = Counter(fetched.values())
    assert ways[False, True] <= 1, "only versions published before the restart, and not yet fetched"
    assert ways[False, False] <= 1, "only a version already held when its report died with the hub"
    assert ways.total() == ways[True, False] + ways[False, True] + ways[False, False]
    check_books(books(run))
    assert (await node.end())[0] == 0
    assert (await hub.end())[0] == 0


def can_make_containers() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
async def test_a_node_in_a_container_on_the_hubs_host_uses_the_swarm(
    site: Any, until: Any, books: Callable[[Path], sqlite3.Connection]
) -> None:
    if not await asyncio.to_thread(can_make_containers):
        pytest.skip("no process namespace can be made here")
    run = await site.make_run("run", "--mode", "sequential", training={"steps": STEPS}, server=ON)
    _, url = await site.hub(run)
    where = ("--data-dir", site.root / "inside", "--name", "inside", "--swarm-host", "127.0.0.1")
    join = ("-m", "echo_node.main", "join", url, *where, "--backend", "torch", "--threads", "1")
    node = await site.program(*CONTAINER, sys.executable, "-u", *join)
    await until(url, lambda view: view["state"] == "finished")
    fetched = fetches_of(books(run), "inside")
    assert set(fetched) >= set(range(1, STEPS))
    assert set(fetched.values()) == {(False, True)}
    check_books(books(run))
    await node.kill()


@pytest.mark.slow
async def test_the_swarm_takes_over_when_a_version_vanishes_from_memory(
    site: Any, until: Any, operator: Any, books: Callable[[Path], sqlite3.Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test removes every second version from the hub's shared memory before the node can read it."""
    honest = HostMemory.address

    def address(memory: HostMemory, version: int, *, node_ip: str) -> SharedMemory | None:
        told = honest(memory, version, node_ip=node_ip)
        if told is not None and version % 2:
            memory.close()
        return told

    monkeypatch.setattr(HostMemory, "address", address)
    run = await site.make_run("run", "--mode", "sequential", training={"steps": STEPS}, server=ON)
    config = load_config(run / "config.toml", {})
    async with open_hub(config, RunDirectory(run)) as hub, asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(hub.serve())
        node = await site.node(hub.url, "beside")
        operator(hub.url, run)
        await until(hub.url, lambda view: view["state"] == "finished")
        assert (await node.end())[0] == 0
        serving.cancel()
    fetched = fetches_of(books(run), "beside")
    assert set(fetched) >= set(range(1, STEPS))
    assert fetched == {version: (version % 2 == 0, version % 2 == 1) for version in fetched}
    check_books(books(run))
