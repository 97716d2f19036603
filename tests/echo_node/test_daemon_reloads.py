"""Settings that the owner changes while the node runs take effect without losing work, or are said to need a
restart.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from echo_node.config import load_config
from echo_node.daemon import Daemon
from echo_node.host import control
from echo_node.host.hubs import Flag
from echo_shared.errors import ConfigError
from echo_shared.wire.messages import Goodbye, LeaseReturned, Proof, Rollout, RolloutParts
from tests.echo_node.fake_sensors import FakeSensors
from tests.echo_node.test_daemon import Node, newest_status, ready_for

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
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setenv("ECHO_NODE_HOME", str(tmp_path / "node"))
    node = Node(None)
    node.paths.config_file.parent.mkdir()
    node.paths.config_file.write_text(SETTINGS)
    return node


def running(node: Node, url: str, sensors: FakeSensors, **given: Flag) -> AbstractAsyncContextManager[Daemon]:
    return node.running(url, config=load_config(node.paths.config_file, given), sensors=sensors, given=given)


async def set_(key: str, *values: str) -> dict[str, Any]:
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


async def test_the_engine_starts_again_with_new_settings_and_nothing_is_lost(hub: Any, node: Node) -> None:
    long = {"count": 8, "max_tokens": 120, "stop_ids": ()}
    async with running(node, hub.url, FakeSensors()):
        await hub.until(ready_for(hub, 0))
        (before,) = node.engine_pids()
        leases = [await hub.lease(number, version=0, **long) for number in range(1, 9)]
        await hub.until(lambda: hub.all(RolloutParts))
        answer = await set_("width", "4")
        assert answer["node"]["engine"] == ["width"] and not answer["node"]["restart"]
        assert (answer["value"], answer["where"]) == (4, f"{node.paths.config_file}, line 3")
        await hub.until(lambda: not psutil.pid_exists(before))
        done = [await hub.finished(lease) for lease in leases]
        await hub.until(lambda: (status := newest_status(hub)) is not None and status.capacity == 2 * 4)
        assert before not in node.engine_pids()
    assert hub.all(LeaseReturned) == [] and isinstance(hub.said[-1], Goodbye)
    drawn = {(r.lease_id, r.index): r.completion_ids.tolist() for of_one in done for r in of_one.values()}
    assert len(drawn) == 8 * 8 == len(hub.all(Rollout))
    for message in hub.all(RolloutParts):
        for part in message.parts:
            end = part.start + len(part.ids)
            assert drawn[part.lease_id, part.index][part.start : end] == part.ids.tolist()


async def test_manners_hold_at_once(hub: Any, node: Node) -> None:
    sensors = FakeSensors()
    async with running(node, hub.url, sensors) as daemon:
        await hub.until(ready_for(hub, 0))
        (pid,) = node.engine_pids()
        answer = await set_("manners.min_free_memory_bytes", str(2**62))
        assert answer["node"]["watch"] == ["manners.min_free_memory_bytes"]
        sensors.reading = sensors.reading.__class__(free_memory_bytes=2**30)
        await hub.until(lambda: (status := newest_status(hub)) is not None and status.activity == "paused")
        assert "memory" in daemon.snapshot().holds
        await hub.until(lambda: not psutil.pid_exists(pid))


async def test_the_hub_hears_the_new_name_and_cost(hub: Any, node: Node) -> None:
    async with running(node, hub.url, FakeSensors()) as daemon:
        await hub.until(ready_for(hub, 0))
        engines = node.engine_pids()
        answer = await set_("name", "the den")
        assert answer["node"]["introduction"] == ["name"]
        await hub.until(lambda: [proof.name for proof in hub.all(Proof)] == ["tester", "the den"])
        await set_("cost_per_hour", "0.5")
        await hub.until(lambda: [proof.cost_per_hour for proof in hub.all(Proof)] == [0, 0, 0.5])
        shown = daemon.snapshot()
        assert (shown.name, shown.cost_per_hour, node.engine_pids()) == ("the den", 0.5, engines)


async def test_settings_that_need_a_restart_are_named_and_overrides_kept(hub: Any, node: Node) -> None:
    async with running(node, hub.url, FakeSensors(), width=2):
        await hub.until(ready_for(hub, 0))
        engines = node.engine_pids()
        assert (await set_("swarm_port", "1"))["node"]["restart"] == ["swarm_port"]
        answer = (await set_("width", "6"))["node"]
        assert answer == {
            "file": str(node.paths.config_file),
            "watch": [],
            "engine": [],
            "introduction": [],
            "restart": ["swarm_port"],
        }
        node.paths.config_file.write_text("threads = 'many'\n")
        with pytest.raises(ConfigError, match="not valid"):
            await control.ask(node.paths.control_file, "reload")
        node.paths.config_file.write_text(SETTINGS)
        assert (await control.ask(node.paths.control_file, "reload"))["restart"] == []
        assert node.engine_pids() == engines and newest_status(hub).capacity == 2 * 2
