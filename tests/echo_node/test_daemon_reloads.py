"""A node whose owner changes its settings while it runs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from echo_node.config import load_config
from echo_node.daemon import Daemon
from echo_node.host import control
from echo_node.host.address import HubAddress
from echo_node.host.hubs import Flag, Joining
from echo_node.host.paths import NodePaths
from echo_node.panel import PlainPanel
from echo_shared.errors import ConfigError, ConnectError
from echo_shared.signing import key_file
from echo_shared.wire.messages import Goodbye, LeaseReturned, Proof, Rollout, RolloutParts
from tests.echo_node.fake_sensors import FakeSensors
from tests.echo_node.test_daemon import newest_status, ready_for

pytest.importorskip("llama_cpp")

SETTINGS = """\
backend = "llama_cpp"
threads = 1
width = 8
stream_s = 0.01
swarm_host = "127.0.0.1"
reconnect_first_s = 0.05
name = "tester"

[manners]
priority = "normal"
"""


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodePaths:
    monkeypatch.setenv("ECHO_NODE_HOME", str(tmp_path / "node"))
    found = NodePaths.find(None)
    found.config_file.parent.mkdir()
    found.config_file.write_text(SETTINGS)
    return found


@asynccontextmanager
async def running(paths: NodePaths, url: str, sensors: FakeSensors, **given: Flag) -> AsyncIterator[Daemon]:
    joining = Joining(
        address=HubAddress.parse(url, insecure=False), pinned=None, invite_token=None, patient=False, given=given
    )
    me = key_file.load_or_create(paths.identity_key)
    daemon = Daemon(
        paths=paths,
        config=load_config(paths.config_file, given),
        me=me,
        joining=joining,
        panel=PlainPanel(),
        sensors=sensors,
    )
    task = asyncio.create_task(daemon.run())
    try:
        yield daemon
    finally:
        with suppress(ConnectError):  # The daemon may have ended already.
            await control.ask(paths.control_file, "stop")
        async with asyncio.timeout(60):
            await task


async def set_(key: str, *values: str) -> dict[str, Any]:
    """Return the JSON from `echo-node config set --json`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "echo_node", "config", "set", "--json", key, *values),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(os.environ),
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    answer: dict[str, Any] = json.loads(out)
    return answer


async def test_the_engine_starts_again_with_new_settings_and_nothing_is_lost(hub: Any, paths: NodePaths) -> None:
    long = {"count": 8, "max_tokens": 120, "stop_ids": ()}
    async with running(paths, hub.url, FakeSensors()):
        await hub.until(ready_for(hub, 0))
        (before,) = engine_pids()
        leases = [await hub.lease(number, version=0, **long) for number in range(1, 9)]
        await hub.until(lambda: hub.all(RolloutParts))
        answer = await set_("width", "4")
        assert answer["node"]["engine"] == ["width"] and not answer["node"]["restart"]
        assert (answer["value"], answer["where"]) == (4, f"{paths.config_file}, line 3")
        await hub.until(lambda: not psutil.pid_exists(before))
        done = [await hub.finished(lease) for lease in leases]
        await hub.until(lambda: (status := newest_status(hub)) is not None and status.capacity == 2 * 4)
        assert before not in engine_pids()
    assert hub.all(LeaseReturned) == [] and isinstance(hub.said[-1], Goodbye)
    drawn = {(r.lease_id, r.index): r.completion_ids.tolist() for of_one in done for r in of_one.values()}
    assert len(drawn) == 8 * 8 == len(hub.all(Rollout))
    for message in hub.all(RolloutParts):
        for part in message.parts:
            end = part.start + len(part.ids)
            assert drawn[part.lease_id, part.index][part.start : end] == part.ids.tolist()


async def test_manners_hold_at_once(hub: Any, paths: NodePaths) -> None:
    sensors = FakeSensors()
    async with running(paths, hub.url, sensors) as daemon:
        await hub.until(ready_for(hub, 0))
        (pid,) = engine_pids()
        answer = await set_("manners.min_free_memory_bytes", str(2**62))
        assert answer["node"]["watch"] == ["manners.min_free_memory_bytes"]
        sensors.reading = sensors.reading.__class__(free_memory_bytes=2**30)
        await hub.until(lambda: (status := newest_status(hub)) is not None and status.activity == "paused")
        assert "memory" in daemon.snapshot().holds
        await hub.until(lambda: not psutil.pid_exists(pid))


async def test_the_hub_hears_the_new_name_and_cost(hub: Any, paths: NodePaths) -> None:
    async with running(paths, hub.url, FakeSensors()) as daemon:
        await hub.until(ready_for(hub, 0))
        engines = engine_pids()
        answer = await set_("name", "the den")
        assert answer["node"]["introduction"] == ["name"]
        await hub.until(lambda: [proof.name for proof in hub.all(Proof)] == ["tester", "the den"])
        await set_("cost_per_hour", "0.5")
        await hub.until(lambda: [proof.cost_per_hour for proof in hub.all(Proof)] == [0, 0, 0.5])
        shown = daemon.snapshot()
        assert (shown.name, shown.cost_per_hour, engine_pids()) == ("the den", 0.5, engines)


async def test_settings_that_need_a_restart_are_named_and_overrides_kept(hub: Any, paths: NodePaths) -> None:
    async with running(paths, hub.url, FakeSensors(), width=2):
        await hub.until(ready_for(hub, 0))
        engines = engine_pids()
        assert (await set_("swarm_port", "1"))["node"]["restart"] == ["swarm_port"]
        answer = (await set_("width", "6"))["node"]
        assert answer == {
            "file": str(paths.config_file),
            "watch": [],
            "engine": [],
            "introduction": [],
            "restart": ["swarm_port"],
        }
        paths.config_file.write_text("threads = 'many'\n")
        with pytest.raises(ConfigError, match="not valid"):
            await control.ask(paths.control_file, "reload")
        paths.config_file.write_text(SETTINGS)
        assert (await control.ask(paths.control_file, "reload"))["restart"] == []
        assert engine_pids() == engines and newest_status(hub).capacity == 2 * 2


def engine_pids() -> list[int]:
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if "echo_node.backends.worker" in " ".join(child.cmdline())]
