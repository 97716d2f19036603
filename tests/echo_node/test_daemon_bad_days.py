"""The whole node with a real engine loses nothing on a machine whose disk is full, that sleeps, or that may not use its
network.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.live_site import LiveSite
from echo_node.core.clocks import SLEPT_S
from echo_node.core.manners import MannersConfig, SensorReading
from echo_node.core.troubles import OVER, TroubleCode
from echo_node.daemon import Daemon
from echo_node.host import control
from echo_node.machine_watch import LOOK_S
from echo_shared.errors import ConfigError
from echo_shared.wire.messages import Fetched, LeaseReturned, Rollout
from tests.echo_node.fake_sensors import FakeSensors
from tests.echo_node.test_daemon import Node, newest_status, ready_for
from tests.echo_node.waiting import until
from tests.small_disk import mounted, needs_mounts

pytest.importorskip("llama_cpp")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "node")


def problems(daemon: Daemon) -> set[str]:
    return set(daemon.snapshot().problems)


@needs_mounts
async def test_a_full_disk_is_one_trouble_and_loses_nothing(
    hub: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with mounted(tmp_path / "disk", 8 * 2**20) as disk:
        node = Node(disk.directory / "node")
        async with node.running(hub.url, sensors=FakeSensors()) as daemon:
            await hub.until(ready_for(hub, 0))
            disk.fill()
            await hub.publish(1)
            await until(lambda: problems(daemon) == {"disk_full"})
            with pytest.raises(ConfigError, match="cannot be stored on disk"):
                await control.ask(node.paths.control_file, "pause", {"length": None})
            await hub.until(lambda: newest_status(hub).activity == "paused")
            await control.ask(node.paths.control_file, "resume")
            await hub.until(lambda: newest_status(hub).capacity > 0)
            lease = await hub.lease(1, version=0)
            await hub.until(lambda: newest_status(hub).capacity == 0)
            assert problems(daemon) == {"disk_full"} and hub.all(Rollout) == []
            disk.empty()
            drawn = await hub.finished(lease)
            await hub.until(ready_for(hub, 1))
            await until(lambda: problems(daemon) == set())
    assert set(drawn) == set(lease.indices)
    assert {report.policy_version for report in hub.all(Fetched)} == {None, 1}
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len([line for line in told if "disk" in line]) == 1, told
    assert [record.message for record in caplog.records].count(OVER[TroubleCode.DISK_FULL]) == 1


@needs_mounts
async def test_a_model_is_converted_once_the_full_disk_has_room(hub: Any, tmp_path: Path) -> None:
    with mounted(tmp_path / "derived", 2 * 2**20) as disk:
        node = Node(tmp_path / "node")
        node.paths.data_dir.mkdir()
        node.paths.derived.symlink_to(disk.directory)
        disk.fill()
        async with node.running(hub.url, sensors=FakeSensors()) as daemon:
            await hub.until(lambda: hub.all(Fetched))
            await until(lambda: problems(daemon) == {"disk_full"})
            assert "does not start" in daemon.snapshot().problems["disk_full"]
            disk.empty()
            await hub.until(ready_for(hub, 0))
            assert problems(daemon) == set()


async def test_a_reached_traffic_cap_sends_held_tokens_and_disconnects(hub: Any, node: Node) -> None:
    node.manners = MannersConfig(priority="normal", max_download_bytes_day=50_000_000)
    async with node.running(hub.url, sensors=FakeSensors()) as daemon:
        await hub.until(ready_for(hub, 0))
        counted = daemon.connections.meter.now().day
        assert counted.sent > 0 and counted.received > 0
        leases = [await hub.lease(number, version=0, count=8, max_tokens=120, stop_ids=()) for number in range(1, 20)]
        daemon.connections.meter.count(received=50_000_000)
        await until(lambda: not daemon.snapshot().connected)
        shown = daemon.snapshot()
        assert shown.activity == "paused" and "downloaded this day" in shown.holds["traffic"] and shown.problems == {}
        back = {(lease.lease_id, index) for lease in hub.all(LeaseReturned) for index in lease.indices}
        back |= {(rollout.lease_id, rollout.index) for rollout in hub.all(Rollout)}
        assert back == {(lease.lease_id, index) for lease in leases for index in lease.indices}
        await hub.publish(1, announce=False)
        daemon._watch.use(MannersConfig(priority="normal"))
        await hub.until(ready_for(hub, 1))
        assert daemon.snapshot().holds == {} and hub.handshakes == 2
    days = json.loads(node.paths.traffic_file.read_text())
    assert sum(received for _, received in days.values()) > 50_000_000


async def test_a_metered_network_is_not_used_at_all(hub: Any, node: Node) -> None:
    sensors = FakeSensors()
    sensors.reading = SensorReading(metered=True)
    async with node.running(hub.url, sensors=sensors) as daemon:
        await sensors.looked_at()
        assert hub.handshakes == 0 and set(daemon.snapshot().holds) == {"metered"}
        sensors.reading = SensorReading(metered=False)
        await hub.until(ready_for(hub, 0))
        assert hub.handshakes == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows stops no process by a signal")
async def test_a_node_that_slept_reconnects_by_itself(hub: Any, site: LiveSite) -> None:
    running = await site.start("echo_node", "join", hub.url, "--data-dir", site.root / "node", "--backend", "llama_cpp")
    await hub.until(ready_for(hub, 0))
    running.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(SLEPT_S + 3 * LOOK_S)  # SIGSTOP for this time stands for the machine's sleep.
    running.process.send_signal(signal.SIGCONT)
    await running.printed(r"This machine slept for \d+ s; reconnecting\.")
    await running.printed(r"Reconnected\.")
    assert hub.handshakes == 2
    await hub.finished(await hub.lease(1, version=0))


@needs_mounts
async def test_a_node_whose_network_changes_connects_again_at_once(hub: Any, site: LiveSite) -> None:
    """A router may drop packets from the old address silently, so the node must not wait for the old connection to
    fail.
    """
    peers: asyncio.Queue[str] = asyncio.Queue()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.put_nowait(writer.get_extra_info("peername")[0])
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", hub.port)
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer), return_exceptions=True)

    with two_networks() as (name, command):
        server = await asyncio.start_server(relay, "10.213.77.1", 0)
        try:
            url = f"http://10.213.77.1:{server.sockets[0].getsockname()[1]}"
            node = [sys.executable, "-u", "-m", "echo_node", "join", url, "--insecure", "--backend", "llama_cpp"]
            running = await site.program("ip", "netns", "exec", name, *node, "--data-dir", site.root / "node")
            await hub.until(ready_for(hub, 0))
            before = hub.handshakes
            command("addr del 10.213.77.2/24 dev inside")
            command("addr add 10.213.77.3/24 dev inside")
            await running.printed(r"This machine has changed its network; reconnecting\.")
            await running.printed(r"Reconnected\.")
            assert hub.handshakes == before + 1
            await hub.finished(await hub.lease(1, version=0))
            await running.end()
        finally:
            server.close()
    came_from = [peers.get_nowait() for _ in range(peers.qsize())]
    assert came_from[0] == "10.213.77.2" and came_from[-1] == "10.213.77.3"


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    writer.close()


@contextmanager
def two_networks() -> Iterator[tuple[str, Callable[[str], None]]]:
    """Yield the network namespace 10.213.77.2, linked to 10.213.77.1, and a function that runs `ip` in this
    namespace.
    """
    name = f"echo-{os.getpid()}"

    def ip(command: str) -> None:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True)

    try:
        ip(f"netns add {name}")
        ip(f"link add name {name[:14]}o type veth peer name inside netns {name}")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network can be made here: {error}")
    try:
        ip(f"addr add 10.213.77.1/24 dev {name[:14]}o")
        ip(f"link set {name[:14]}o up")
        for command in ("link set lo up", "addr add 10.213.77.2/24 dev inside", "link set inside up"):
            ip(f"-n {name} {command}")
        yield name, lambda command: ip(f"-n {name} {command}")
    finally:
        ip(f"netns delete {name}")
