"""Faults of real fleets: every honest node must end with the right files, without help.

The nodes of a small fleet have joined. A version is announced; the fault comes before that or midway. A node that has
not verified the version `PATIENCE_S` after the fault is stuck. Faults need links of their own, and so root.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.dissemination.fleet import Fleet, HostFailed, open_fleet
from benchmarks.dissemination.links import HUB, Links, LinkSet, can_shape, run_command
from benchmarks.dissemination.payload import digest_of, write_adapter
from benchmarks.dissemination.rounds import Row, digests, received, shares
from benchmarks.harness.progress import Planned, Progress

log = logging.getLogger(__name__)

LINKS: Final = LinkSet(hub_up=20, node_down=100, node_up=20)
NUM_NODES: Final = 4
PAYLOAD_BYTES: Final = 4_000_000
MIDWAY_S: Final = 0.8
"""Time after the announcement: half of the bound."""
OUTAGE_S: Final = 10.0
PATIENCE_S: Final = 90.0
WAYS: Final = ("broadcast", "swarm")
AT_ONCE: Final = 2
"""Scenes in parallel."""
SCENE_S: Final = 20.0
DISK_BYTES: Final = 64 * 2**20
VERSION: Final = 1
SIDE: Final = "echo"
VICTIM: Final = 1
"""The host of faults that happen to a node."""

CONDITIONS: Final = (
    f"{NUM_NODES} nodes, {LINKS.name} Mbit/s, {PAYLOAD_BYTES / 1e6:g} MB; each with the way pinned, "
    f"but for what nodes turn to by themselves; survived: every honest node had the published files within "
    f"{PATIENCE_S:.0f} s after the damage"
)


class Scene:
    """A fleet, and the version for it."""

    def __init__(self, fleet: Fleet, links: Links, *, way: str, seed: int, at_end: ExitStack) -> None:
        self.fleet = fleet
        self.links = links
        self.honest = list(fleet.nodes)
        """Hosts whose nodes must get the version."""
        self.at_end = at_end
        """Closed after the end of all processes."""
        self.payload_bytes = 0
        self.announced_at = 0.0
        self.adapter = fleet.directory / "adapter"
        self._way = way
        self._port = 0
        write_adapter(self.adapter, PAYLOAD_BYTES, seed)

    async def open_hub(self) -> str:
        """Open the hub; return its URL, which is the same after a restart."""
        url: str = await self.fleet.hub.ask("open_echo", side=SIDE, way=self._way, port=self._port)
        self._port = int(url.rpartition(":")[2])
        return url

    async def prepare(self) -> None:
        ready = await self.fleet.hub.ask("prepare", side=SIDE, version=VERSION, adapter=str(self.adapter))
        self.payload_bytes = ready["bytes"]

    async def announce(self) -> None:
        self.announced_at = await self.fleet.hub.ask("announce", side=SIDE, version=VERSION)

    async def announce_and_wait_till_midway(self) -> None:
        """Announce, and wait. Raises RuntimeError if a node already has the version: the fault would come too late."""
        await self.announce()
        await asyncio.sleep(MIDWAY_S)
        if any(await self.fleet.of_nodes("has", side=SIDE, version=VERSION)):
            raise RuntimeError("the version had arrived before the fault came")

    async def until_received(self) -> tuple[list[Row], set[str]]:
        """Wait for all honest nodes. Returns their reports, and hashes of their files. Raises TimeoutError if a node is
        stuck."""
        nodes = [self.fleet.nodes[host] for host in self.honest]
        async with asyncio.timeout(PATIENCE_S):
            return await received(nodes, SIDE, VERSION), await digests(nodes, SIDE, VERSION)


Act = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault. `before` runs between the start of the hub and the joins of nodes; `play` announces the version."""

    name: str
    before: Act | None = None
    play: Act = Scene.announce
    nodes_are_linked: bool = True
    """True if all nodes are linked before the announcement."""


async def _turn_one_hostile(scene: Scene) -> None:
    await scene.fleet.nodes[VICTIM].ask("turn_hostile")
    scene.honest.remove(VICTIM)
    await scene.announce()


async def _kill_one(scene: Scene) -> None:
    await scene.announce_and_wait_till_midway()
    scene.honest.remove(VICTIM)
    await scene.fleet.nodes[VICTIM].kill()


async def _block_ports(scene: Scene) -> None:
    scene.links.part_nodes()
    scene.links.block_port(HUB, await scene.fleet.hub.ask("swarm_port", side=SIDE))


async def _silence_tracker(scene: Scene) -> None:
    await scene.fleet.hub.ask("silence_tracker", side=SIDE)


async def _cut_uplink(scene: Scene) -> None:
    await scene.announce_and_wait_till_midway()
    scene.links.cut(HUB)
    await asyncio.sleep(OUTAGE_S)
    scene.links.mend(HUB)


async def _restart_hub(scene: Scene) -> None:
    """Restart like a real hub: the restarted hub publishes the version again and offers the version to joining
    nodes."""
    await scene.announce_and_wait_till_midway()
    await scene.fleet.hub.kill()
    await scene.fleet.start(HUB)
    await scene.open_hub()
    await scene.prepare()


async def _give_one_a_small_disk(scene: Scene) -> None:
    disk = scene.fleet.directory / "disk"
    disk.mkdir()
    run_command("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk))
    scene.at_end.callback(run_command, "umount", str(disk))
    await scene.fleet.nodes[VICTIM].end()
    await scene.fleet.start(VICTIM, disk)


async def _fill_disk(scene: Scene) -> None:
    ballast = scene.fleet.directory / "disk" / "ballast"
    room = os.statvfs(ballast.parent)
    ballast.write_bytes(bytes(room.f_bavail * room.f_frsize - PAYLOAD_BYTES // 2))
    await scene.announce()
    await asyncio.sleep(OUTAGE_S)
    ballast.unlink()


FAULTS: Final = (
    Fault(name="a peer sends corrupt pieces", play=_turn_one_hostile),
    Fault(name="a peer is killed in mid-download", play=_kill_one),
    Fault(name="peers' ports are blocked", before=_block_ports, nodes_are_linked=False),
    Fault(name="the tracker is down", before=_silence_tracker),
    Fault(name=f"the hub's uplink is cut for {OUTAGE_S:.0f} s", play=_cut_uplink),
    Fault(name="the hub is killed and restarted in mid-broadcast", play=_restart_hub),
    Fault(name=f"a node's disk is full for {OUTAGE_S:.0f} s", before=_give_one_a_small_disk, play=_fill_disk),
)


def plan() -> list[Planned]:
    lacks = "" if can_shape() else "links that can be shaped: root's rights, and iproute2"
    return [Planned(name=_name(fault, way), seconds=SCENE_S / AT_ONCE, lacks=lacks) for fault in FAULTS for way in WAYS]


async def try_all(seed: int, progress: Progress) -> list[Row]:
    """Try all wanted faults; one row for each fault and way."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def in_turn(fault: Fault, way: str) -> Row:
        async with turns:
            row = await try_one(fault, way, seed)
        progress.done(_name(fault, way), {name: row.get(name) for name in ("survived", "seconds")})
        return row

    wanted = [(fault, way) for fault in FAULTS for way in WAYS if progress.wants(_name(fault, way))]
    return await asyncio.gather(*(in_turn(fault, way) for fault, way in wanted))


def _name(fault: Fault, way: str) -> str:
    return f"fault, {fault.name}, {way}"


async def try_one(fault: Fault, way: str, seed: int) -> Row:
    """Try one fault. `survived` is True if every honest node has exactly the published files; `seconds` counts until
    the slowest honest node had all files."""
    about = {"fault": fault.name, "way": way, "nodes": NUM_NODES}
    with tempfile.TemporaryDirectory(prefix="echo-faults-") as directory, ExitStack() as at_end:
        try:
            scene, got, hashes = await _run(fault, way, seed, Path(directory), at_end)
        except (HostFailed, TimeoutError) as error:
            log.warning("%s, %s: %s", fault.name, way, error or "a node is stuck")
            return {**about, "survived": False}
        return {
            **about,
            "payload_bytes": scene.payload_bytes,
            "survived": hashes == {digest_of(scene.adapter)},
            "seconds": max(node["at"] for node in got) - scene.announced_at,
            **shares(got, scene.payload_bytes),
        }


async def _run(
    fault: Fault, way: str, seed: int, directory: Path, at_end: ExitStack
) -> tuple[Scene, list[Row], set[str]]:
    """Play one fault. Returns the scene, and the results of `Scene.until_received`."""
    async with open_fleet(LINKS, NUM_NODES, directory) as fleet:
        if not isinstance(fleet.net, Links):
            raise RuntimeError("faults take shaped links")
        scene = Scene(fleet, fleet.net, way=way, seed=seed, at_end=at_end)
        url = await scene.open_hub()
        if fault.before is not None:
            await fault.before(scene)
        await fleet.of_nodes("join", side=SIDE, url=url)
        if fault.nodes_are_linked:
            await fleet.hub.ask("linked", side=SIDE, num_nodes=NUM_NODES)
        await scene.prepare()
        await fault.play(scene)
        return scene, *await scene.until_received()
