"""The whole node with a real engine pauses, resumes and finishes when its owner says so, also across a restart."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from echo_node.core.manners import MannersConfig, SensorReading
from echo_node.host import control
from echo_node.host.hardware import sensible_threads
from echo_shared.errors import ConfigError
from echo_shared.wire.messages import Fetched, Goodbye, LeaseReturned, NodeStatus, Rollout
from tests.echo_node.fake_sensors import FakeSensors
from tests.echo_node.host.sensors.conftest import Desktop, desktop
from tests.echo_node.test_daemon import Node, newest_status, ready_for
from tests.echo_node.waiting import until

__all__ = ["desktop"]

pytest.importorskip("llama_cpp")

GNOME = "org.gnome.SessionManager"
LONG = {"count": 8, "max_tokens": 120, "stop_ids": ()}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "node")


def is_still(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def fetched(hub: Any) -> set[int | None]:
    return {report.policy_version for report in hub.all(Fetched)}


def returned(hub: Any) -> set[tuple[int, int]]:
    return {(m.lease_id, index) for m in hub.all(LeaseReturned) for index in m.indices}


def finished(hub: Any) -> set[tuple[int, int]]:
    return {(r.lease_id, r.index) for r in hub.all(Rollout)}


def computed_s(pid: int) -> float:
    return sum(psutil.Process(pid).cpu_times()[:2])


async def test_a_paused_node_stops_returns_its_leases_and_resumes(hub: Any, node: Node) -> None:
    async with node.running(hub.url, sensors=FakeSensors()) as daemon:
        await hub.until(ready_for(hub, 0))
        (pid,) = node.engine_pids()
        leases = [await hub.lease(n, version=0, **LONG) for n in range(1, 30)]
        answer = await control.ask(node.paths.control_file, "pause", {"length": "2h"})
        assert answer == {"until": pytest.approx(time.time() + 7_200, abs=60)}
        await hub.until(lambda: is_still(pid))
        status = newest_status(hub)
        assert (status.activity, status.capacity) == ("paused", 0)
        leased = {(one.lease_id, index) for one in leases for index in one.indices}
        await hub.until(lambda: returned(hub) | finished(hub) == leased)
        assert returned(hub) and not returned(hub) & finished(hub)
        shown = daemon.snapshot()
        assert shown.activity == "paused" and "Paused by you until" in shown.holds["paused"]
        await hub.publish(1)
        before = computed_s(pid)
        await hub.until(lambda: 1 in fetched(hub))
        assert computed_s(pid) == before and is_still(pid), "new versions are fetched meanwhile"
        assert await control.ask(node.paths.control_file, "resume") == {}
        await hub.until(ready_for(hub, 1))
        await hub.finished(await hub.lease(30, version=1))
        assert node.engine_pids() == [pid]
    assert not psutil.pid_exists(pid)


async def test_a_pause_does_not_wait_for_a_hub_that_reads_nothing(hub: Any, node: Node) -> None:
    many = tuple(range(2**50, 2**50 + 1_024))

    async def flood() -> None:
        # The node holds enough work, so it answers each of these leases with 9 KB, until the connection takes no more.
        with suppress(ConnectionError):
            for number in range(5, 5_000):
                await hub.lease(number, version=0, indices=many)

    async with node.running(hub.url, sensors=FakeSensors()) as daemon:
        await hub.until(ready_for(hub, 0))
        (pid,) = node.engine_pids()
        for number in range(1, 5):
            await hub.lease(number, version=0, **{**LONG, "count": 1_024})
        await hub.until(lambda: hub.all(Rollout))
        hub.stop_reading()
        flooding = asyncio.create_task(flood())
        await until(lambda: bool(daemon.connections.client._sends) and daemon._inbox.full())
        await control.ask(node.paths.control_file, "pause")
        async with asyncio.timeout(10):  # A send waits for the hub up to 30 seconds.
            await until(lambda: is_still(pid))
        flooding.cancel()
        await control.ask(node.paths.control_file, "resume")


async def test_a_node_that_was_paused_starts_paused_and_loads_nothing(hub: Any, node: Node) -> None:
    node.paths.data_dir.mkdir(parents=True)
    node.paths.pause_file.write_text('{"until": null}')
    sensors = FakeSensors()
    sensors.reading = SensorReading(hub_gpu=0.9)
    async with node.running(hub.url, sensors=sensors) as daemon:
        await hub.until(lambda: None in fetched(hub))
        await hub.until(lambda: (status := newest_status(hub)) is not None and status.activity == "paused")
        assert node.engine_pids() == []
        assert daemon.snapshot().hub_gpu == 0.9
        with pytest.raises(ConfigError, match="not a length of time"):
            await control.ask(node.paths.control_file, "pause", {"length": "soon"})
        await control.ask(node.paths.control_file, "resume")
        await hub.until(ready_for(hub, 0))
    assert not node.paths.pause_file.exists()


async def test_a_finishing_node_completes_its_leases_and_leaves(hub: Any, node: Node) -> None:
    async with node.running(hub.url, sensors=FakeSensors()) as daemon:
        await hub.until(ready_for(hub, 0))
        leases = [await hub.lease(n, version=0) for n in (1, 2, 3)]
        answer = await control.ask(node.paths.control_file, "finish")
        assert answer["pid"] == os.getpid()
        await hub.until(lambda: hub.all(Goodbye))
        assert daemon.snapshot().held_rollouts == 0
    assert hub.all(LeaseReturned) == []
    assert {(r.lease_id, r.index) for r in hub.all(Rollout)} == {
        (lease.lease_id, index) for lease in leases for index in lease.indices
    }
    assert [m.capacity for m in hub.all(NodeStatus)][-1] == 0


async def test_a_level_of_the_schedule_slows_the_engine_down(hub: Any, node: Node) -> None:
    cores = sensible_threads()
    node.manners = MannersConfig(priority="normal", schedule=(f"{round(25 / cores)}%",))
    async with node.running(hub.url, sensors=FakeSensors()) as daemon:
        await hub.until(ready_for(hub, 0))
        (pid,) = node.engine_pids()
        for number in range(1, 30):
            await hub.lease(number, version=0, **LONG)
        await hub.until(lambda: len(hub.all(Rollout)) > 2)
        began, before_s = time.monotonic(), computed_s(pid)
        await asyncio.sleep(2.0)
        share = (computed_s(pid) - before_s) / (time.monotonic() - began) / cores
        shown = daemon.snapshot()
    assert 0.4 * shown.share < share < 1.15 * shown.share
    assert shown.share_reason == f"{shown.share:.0%}".replace("%", " %") + (
        " of the processor's time because of the schedule"
    )
    assert shown.activity == "sampling" and not shown.holds


async def test_a_working_node_keeps_its_machine_awake_until_a_pause(hub: Any, node: Node, desktop: Desktop) -> None:
    desktop.serve(GNOME)
    desktop.answers["/org/gnome/SessionManager", "Inhibit"] = ("u", (17,))
    node.manners = MannersConfig(priority="normal", keep_awake=True)
    async with node.running(hub.url, sensors=FakeSensors()) as daemon:
        await hub.until(ready_for(hub, 0))
        for number in range(30, 90):
            await hub.lease(number, version=0, **LONG)
        await hub.until(lambda: bool(daemon.snapshot().awake))
        assert daemon.snapshot().awake == "kept by GNOME's session manager"
        (locked,) = set(desktop.senders)
        assert desktop.is_connected(locked)
        await control.ask(node.paths.control_file, "pause")
        await hub.until(lambda: not desktop.is_connected(locked))
        assert daemon.snapshot().awake == ""
        await control.ask(node.paths.control_file, "resume")
        await hub.until(ready_for(hub, 0))
        for number in range(1, 30):
            await hub.lease(number, version=0, **LONG)
        await hub.until(lambda: bool(daemon.snapshot().awake))
    assert not any(desktop.is_connected(sender) for sender in set(desktop.senders))
