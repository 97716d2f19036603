"""Faults in a small fleet: every honest node must get the right files without help. A version is announced after the
nodes have joined; the fault happens before the announcement or midway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.dissemination import fleet as fleets
from benchmarks.dissemination import links
from benchmarks.dissemination.fleet import Fleet, open_fleet
from benchmarks.dissemination.links import HUB, Links, LinkSet, run_command
from benchmarks.dissemination.rounds import Row, digest_of, digests, received, shares, write_adapter
from benchmarks.harness import small_disk

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not links.can_shape(), reason="namespaces with shaped links take root and iproute2"),
]
LINKS = LinkSet(hub_up=20, node_down=100, node_up=20)
NUM_NODES = 3
PAYLOAD_BYTES = 6_000_000
MIDWAY_S = 0.3
"""Seconds from the announcement to the fault. It is only an eighth of the lower bound on the transfer time, because the
fault comes later than planned on a busy machine.
"""
OUTAGE_S = 4.0
PATIENCE_S = 90.0
"""Seconds after the fault within which all honest nodes must have the files; then a node without them counts as stuck.
"""
WAYS = ("broadcast", "swarm")
DISK_BYTES = 64 * 2**20
VERSION = 1
SIDE = "echo"
VICTIM = 1
"""Index of the host that a fault hits."""


class Scene:
    def __init__(self, fleet: Fleet, net: Links, *, way: str, at_end: ExitStack) -> None:
        self.fleet = fleet
        self.net = net
        self.honest = list(fleet.nodes)
        """Indices of the hosts whose nodes must get the version."""
        self.at_end = at_end
        """Exit stack that is closed after all processes have ended. A fault's actions add what must be undone then."""
        self.payload_bytes = 0
        self.announced_at = 0.0
        self.adapter = fleet.directory / "adapter"
        self._way = way
        self._port = 0
        write_adapter(self.adapter, PAYLOAD_BYTES, 1)

    async def open_hub(self) -> str:
        """Open the hub; return its URL, which stays the same over a restart."""
        url: str = await self.fleet.hub.ask("open_echo", side=SIDE, way=self._way, port=self._port)
        self._port = int(url.rpartition(":")[2])
        return url

    async def prepare(self) -> None:
        ready = await self.fleet.hub.ask("prepare", side=SIDE, version=VERSION, adapter=str(self.adapter))
        self.payload_bytes = ready["bytes"]

    async def announce(self) -> None:
        self.announced_at = await self.fleet.hub.ask("announce", side=SIDE, version=VERSION)

    async def announce_and_wait_till_midway(self) -> None:
        """Announce the version and wait until the middle of its transfer (`MIDWAY_S`). Raises RuntimeError if a node
        already has the version, because then the fault comes too late.
        """
        await self.announce()
        await asyncio.sleep(MIDWAY_S)
        if any(await self.fleet.of_nodes("has", side=SIDE, version=VERSION)):
            raise RuntimeError("the version had arrived before the fault came")

    async def until_received(self) -> tuple[list[Row], set[str]]:
        """Wait until all honest nodes have the files; return their reports, and the hashes of the files. Raises
        TimeoutError if a node is stuck.
        """
        nodes = [self.fleet.nodes[host] for host in self.honest]
        async with asyncio.timeout(PATIENCE_S):
            return await received(nodes, SIDE, VERSION), await digests(nodes, SIDE, VERSION)


Act = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`before` is called after the hub's start and before the nodes join; `play` announces the version and causes the
    fault.
    """

    name: str
    before: Act | None = None
    play: Act = Scene.announce
    nodes_are_linked: bool = True
    """True to announce only after all nodes are linked."""


async def _turn_one_hostile(scene: Scene) -> None:
    await scene.fleet.nodes[VICTIM].ask("turn_hostile")
    scene.honest.remove(VICTIM)
    await scene.announce()


async def _kill_one(scene: Scene) -> None:
    await scene.announce_and_wait_till_midway()
    scene.honest.remove(VICTIM)
    await scene.fleet.nodes[VICTIM].kill()


async def _block_ports(scene: Scene) -> None:
    for host in range(1, NUM_NODES + 1):
        run_command("bridge", "-n", scene.net.bridge, "link", "set", "dev", f"port{host}", "isolated", "on")
    rules = ("ip", "-n", scene.net.command(HUB)[-1], "rule")
    # Linux looks up local addresses by rule 0, before any other rule. This lookup moves to rule 20, so that rule 10
    # comes first.
    run_command(*rules, "add", "pref", "20", "lookup", "local")
    port = await scene.fleet.hub.ask("swarm_port", side=SIDE)
    run_command(*rules, "add", "pref", "10", "dport", str(port), "blackhole")
    run_command(*rules, "delete", "pref", "0")


async def _silence_tracker(scene: Scene) -> None:
    await scene.fleet.hub.ask("silence_tracker", side=SIDE)


async def _cut_uplink(scene: Scene) -> None:
    await scene.announce_and_wait_till_midway()
    for state in ("down", "up"):
        run_command("ip", "-n", scene.net.bridge, "link", "set", f"port{HUB}", state)
        if state == "down":
            await asyncio.sleep(OUTAGE_S)


async def _restart_hub(scene: Scene) -> None:
    """Restart the hub. It publishes the version again, and offers it to joining nodes."""
    await scene.announce_and_wait_till_midway()
    await scene.fleet.hub.kill()
    await scene.fleet.start(HUB)
    await scene.open_hub()
    await scene.prepare()


async def _give_one_a_small_disk(scene: Scene) -> None:
    disk = scene.at_end.enter_context(small_disk.mounted(scene.fleet.directory / "disk", DISK_BYTES))
    await scene.fleet.nodes[VICTIM].end()
    await scene.fleet.start(VICTIM, disk.directory)


async def _fill_disk(scene: Scene) -> None:
    disk = small_disk.SmallDisk(scene.fleet.directory / "disk")
    disk.fill(leave_bytes=PAYLOAD_BYTES // 2)
    await scene.announce()
    await asyncio.sleep(OUTAGE_S)
    disk.empty()


FAULTS = (
    Fault(name="a peer sends corrupt pieces", play=_turn_one_hostile),
    Fault(name="a peer is killed in mid-download", play=_kill_one),
    Fault(name="peers' ports are blocked", before=_block_ports, nodes_are_linked=False),
    Fault(name="the tracker is down", before=_silence_tracker),
    Fault(name=f"the hub's uplink is cut for {OUTAGE_S:.0f} s", play=_cut_uplink),
    Fault(name="the hub is killed and restarted in mid-broadcast", play=_restart_hub),
    Fault(name=f"a node's disk is full for {OUTAGE_S:.0f} s", before=_give_one_a_small_disk, play=_fill_disk),
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
async def test_every_honest_node_ends_with_the_very_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: Fault, way: str
) -> None:
    monkeypatch.setattr(fleets, "HUB_MODULE", "tests.end_to_end.faulty_hub")
    monkeypatch.setattr(fleets, "NODE_MODULE", "tests.end_to_end.faulty_node")
    with ExitStack() as at_end:
        async with open_fleet(LINKS, NUM_NODES, tmp_path) as fleet:
            assert isinstance(fleet.net, Links)
            scene = Scene(fleet, fleet.net, way=way, at_end=at_end)
            url = await scene.open_hub()
            if fault.before is not None:
                await fault.before(scene)
            await fleet.of_nodes("join", side=SIDE, url=url)
            if fault.nodes_are_linked:
                await fleet.hub.ask("linked", side=SIDE, num_nodes=NUM_NODES)
            await scene.prepare()
            await fault.play(scene)
            got, hashes = await scene.until_received()
    assert hashes == {digest_of(scene.adapter)}
    came = shares(got, scene.payload_bytes)
    assert sum(came.values()) > 0
    if fault.name == "peers' ports are blocked":
        assert came["mesh"] == came["swarm"] == 0
