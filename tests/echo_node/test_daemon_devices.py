"""The whole node with two devices: two real engines, each in its own process. Only the detection of the devices is
faked: it finds CUDA devices, whose engines in truth run on this machine's processor.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from echo_node.config import NodeConfig
from echo_node.core.manners import GpuFigures, MannersConfig, SensorReading
from echo_node.daemon import Daemon
from echo_node.host import control
from echo_node.host.hardware import Gpu
from echo_shared.errors import BackendError, ConfigError
from echo_shared.wire.messages import LeaseReturned, NodeStatus, Rollout
from tests.echo_node.fake_sensors import FakeSensors
from tests.echo_node.test_daemon import Node, newest_status, ready_for
from tests.echo_node.test_daemon_yields import computed_s, finished, is_still, returned

pytest.importorskip("llama_cpp")

ONE, TWO = "cuda:0", "cuda:1"
WIDTH = 4
LONG = {"count": 8, "max_tokens": 120, "stop_ids": ()}


@pytest.fixture
def node(tmp_path: Path, fake_gpus: dict[str, Gpu]) -> Node:
    return Node(tmp_path / "node")


def config(**values: Any) -> NodeConfig:
    return NodeConfig(
        backend="llama_cpp",
        devices=(ONE, TWO),
        threads=2,
        width=WIDTH,
        stream_s=0.05,
        swarm_host="127.0.0.1",
        reconnect_first_s=0.05,
        name="tester",
        manners=MannersConfig(priority="normal"),
        **values,
    )


def pids_of(daemon: Daemon) -> dict[str, int]:
    return daemon._run.engine_pids


def leased(leases: list[Any]) -> set[tuple[int, int]]:
    return {(one.lease_id, index) for one in leases for index in one.indices}


def capacity_is(hub: Any, capacity: int) -> Any:
    return lambda: (status := newest_status(hub)) is not None and status.capacity == capacity


async def test_each_engine_has_its_device_and_gets_a_part_of_the_work(hub: Any, node: Node) -> None:
    async with node.running(hub.url, config=config(), sensors=FakeSensors()) as daemon:
        await hub.until(capacity_is(hub, 2 * 2 * WIDTH))
        pids = pids_of(daemon)
        assert set(pids) == {ONE, TWO} and len(node.engine_pids()) == 2
        seen = {name: psutil.Process(pid).environ()["CUDA_VISIBLE_DEVICES"] for name, pid in pids.items()}
        assert seen == {ONE: "GPU-0", TWO: "GPU-1"}
        leases = [await hub.lease(number, version=0, count=4, max_tokens=60, stop_ids=()) for number in range(1, 5)]
        await hub.until(lambda: finished(hub) == leased(leases))
        worked_s = {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}
        await hub.publish(1)
        await hub.until(ready_for(hub, 1))
        more = [await hub.lease(number, version=1, count=4) for number in (5, 6)]
        await hub.until(lambda: finished(hub) == leased(leases + more))
    assert len(hub.all(Rollout)) == len(leased(leases + more)) and returned(hub) == set()
    assert all(seconds > 0.05 for seconds in worked_s.values())
    assert node.engine_pids() == []


async def test_a_killed_engine_leaves_its_rollouts_to_the_other(hub: Any, node: Node) -> None:
    async with node.running(hub.url, config=config(), sensors=FakeSensors()) as daemon:
        await hub.until(capacity_is(hub, 2 * 2 * WIDTH))
        pids = pids_of(daemon)
        leases = [await hub.lease(number, version=0, **LONG) for number in (1, 2)]
        await hub.until(lambda: hub.all(NodeStatus)[-1].activity == "sampling")
        os.kill(pids[TWO], signal.SIGKILL)
        await hub.until(lambda: finished(hub) == leased(leases))
        await hub.until(lambda: pids_of(daemon).get(TWO, pids[TWO]) != pids[TWO])
        assert pids_of(daemon)[ONE] == pids[ONE], "the other engine went on"
        await hub.until(capacity_is(hub, 2 * 2 * WIDTH))
    assert len(hub.all(Rollout)) == len(leased(leases)) and returned(hub) == set()


async def test_one_paused_device_hands_its_work_over_and_resumes(hub: Any, node: Node) -> None:
    async with node.running(hub.url, config=config(), sensors=FakeSensors()) as daemon:
        await hub.until(capacity_is(hub, 2 * 2 * WIDTH))
        pids = pids_of(daemon)
        leases = [await hub.lease(number, version=0, **LONG) for number in (1, 2)]
        await hub.until(lambda: hub.all(NodeStatus)[-1].activity == "sampling")
        answer = await control.ask(node.paths.control_file, "pause", {"device": TWO, "length": "2h"})
        assert answer == {"until": pytest.approx(time.time() + 7_200, abs=60)}
        await hub.until(lambda: is_still(pids[TWO]))
        await hub.until(capacity_is(hub, 2 * WIDTH))
        before = computed_s(pids[TWO])
        await hub.until(lambda: finished(hub) | returned(hub) == leased(leases))
        assert finished(hub) and not finished(hub) & returned(hub)
        more = await hub.lease(3, version=0, count=4)
        await hub.until(lambda: leased([more]) <= finished(hub))
        assert computed_s(pids[TWO]) == before and not is_still(pids[ONE])
        one, two = (await control.ask(node.paths.control_file, "status"))["devices"]
        assert (one["state"], one["holds"], two["state"]) == ("waiting", {}, "paused")
        assert two["holds"]["paused"].startswith("You have paused cuda:1 until")
        assert daemon.snapshot().state == "waiting"
        with pytest.raises(ConfigError, match="no device cuda:9"):
            await control.ask(node.paths.control_file, "pause", {"device": "cuda:9"})
        await control.ask(node.paths.control_file, "resume", {"device": TWO})
        await hub.until(capacity_is(hub, 2 * 2 * WIDTH))
        assert pids_of(daemon) == pids
        last = [await hub.lease(number, version=0, count=4) for number in (4, 5)]
        await hub.until(lambda: leased(last) <= finished(hub))
    every = leased([*leases, more, *last])
    rollouts = [(one.lease_id, one.index) for one in hub.all(Rollout)]
    given_back = [(one.lease_id, index) for one in hub.all(LeaseReturned) for index in one.indices]
    assert sorted(rollouts + given_back) == sorted(every), "leased = returned + handed back"


async def test_a_hot_gpu_pauses_alone_and_all_paused_devices_pause_the_node(hub: Any, node: Node) -> None:
    sensors = FakeSensors()
    sensors.reading = SensorReading(gpus={"GPU-0": GpuFigures(celsius=60.0), "GPU-1": GpuFigures(celsius=95.0)})
    async with node.running(hub.url, config=config(), sensors=sensors) as daemon:
        await hub.until(capacity_is(hub, 2 * WIDTH))
        assert list(pids_of(daemon)) == [ONE], "an engine that may not work is not started"
        assert daemon._watch.device_holds[TWO][0].sentence.startswith("cuda:1: The GPU is 95 °C warm")
        await control.ask(node.paths.control_file, "pause", {"device": ONE})
        await hub.until(lambda: newest_status(hub).activity == "paused")
        snapshot = daemon.snapshot()
        assert (snapshot.state, snapshot.holds) == ("paused", {})
        assert "You have paused cuda:0." in snapshot.reason and "95 °C" in snapshot.reason
    again = node.daemon(hub.url, config=config(), sensors=FakeSensors())
    assert again._watch._devices._pauses.keys() == {ONE}, "a restarted node is still paused"


async def test_a_node_works_without_a_device_that_is_gone(hub: Any, node: Node, fake_gpus: dict[str, Gpu]) -> None:
    gone = fake_gpus.pop(TWO)
    async with node.running(hub.url, config=config(), sensors=FakeSensors()) as daemon:
        await hub.until(capacity_is(hub, 2 * WIDTH))
        await hub.finished(await hub.lease(1, version=0))
        assert "cuda:1 is not here" in daemon.snapshot().problems["engine"]
        fake_gpus[TWO] = gone
        await hub.until(capacity_is(hub, 2 * 2 * WIDTH))
        assert "engine" not in daemon.snapshot().problems


async def test_a_node_without_all_its_devices_does_not_start(hub: Any, node: Node, fake_gpus: dict[str, Gpu]) -> None:
    fake_gpus.clear()
    with pytest.raises(BackendError, match=r"cuda:0 is not here"):
        await node.daemon(hub.url, config=config(), sensors=FakeSensors()).run()
