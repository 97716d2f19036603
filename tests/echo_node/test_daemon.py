"""The whole node against a hub of real parts: a real websocket and swarm, and llama.cpp in its child process."""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from echo_node import daemon as daemon_module
from echo_node.backends import registry
from echo_node.backends.registry import BackendChoice
from echo_node.config import BackendName, NodeConfig
from echo_node.core.manners import MannersConfig
from echo_node.daemon import Daemon
from echo_node.host import control
from echo_node.host.address import HubAddress
from echo_node.host.hubs import Hubs, Joining
from echo_node.host.paths import NodePaths
from echo_node.host.sensors.machine import Sensors
from echo_node.host.spool import Spool
from echo_node.net.mesh import MeshLinks
from echo_node.panel import PlainPanel
from echo_shared.artefacts.manifest import open_offer
from echo_shared.cage.guards import GUARDS
from echo_shared.errors import ConnectError, RefusedError, StorageError
from echo_shared.process import process_memory
from echo_shared.signing import key_file
from echo_shared.signing.identity import Identity
from echo_shared.wire import relay_tree
from echo_shared.wire.messages import (
    DropReason,
    Fetched,
    Goodbye,
    Have,
    KeyframeWanted,
    KeysRotated,
    LeasedPrefix,
    LeaseReturned,
    Links,
    MeshPeer,
    NodeStatus,
    Piece,
    PolicyPublished,
    Proof,
    Receipt,
    Receipts,
    ReceiptState,
    ReceiptsWanted,
    RefusalCode,
    Rollout,
    RolloutPart,
    RolloutParts,
    RunKey,
    Unwanted,
    Way,
)
from echo_shared.wire.messages import Mesh as MeshNews

pytest.importorskip("llama_cpp")


class Node:
    def __init__(self, data_dir: Path | None) -> None:
        self.paths = NodePaths.find(data_dir)
        self.backend: BackendName = "llama_cpp"
        self.precision = "auto"
        self.stream_s = 5.0
        self.manners = MannersConfig(priority="normal")

    def daemon(
        self,
        url: str,
        *,
        config: NodeConfig | None = None,
        probe_s: float = 60.0,
        sensors: Sensors | None = None,
        **joining: Any,
    ) -> Daemon:
        address = HubAddress.parse(url, insecure=False)
        options = {"pinned": Hubs(self.paths).at(address.origin), "invite_token": None, "patient": False, **joining}
        config = config or NodeConfig(
            backend=self.backend,
            precision=self.precision,
            threads=1,
            width=8,
            stream_s=self.stream_s,
            swarm_host="127.0.0.1",
            reconnect_first_s=0.05,
            name="tester",
            manners=self.manners,
        )
        me = key_file.load_or_create(self.paths.identity_key)
        return Daemon(
            paths=self.paths,
            config=config,
            me=me,
            joining=Joining(address=address, **options),
            panel=PlainPanel(),
            probe_s=probe_s,
            sensors=sensors,
        )

    @asynccontextmanager
    async def running(self, url: str, **options: Any) -> AsyncIterator[Daemon]:
        daemon = self.daemon(url, **options)
        task = asyncio.create_task(daemon.run())
        try:
            yield daemon
        finally:
            with suppress(ConnectError):  # The daemon may have ended already.
                await control.ask(self.paths.control_file, "stop")
            async with asyncio.timeout(60):
                await task

    def engine_pids(self) -> list[int]:
        children = psutil.Process().children(recursive=True)
        return [child.pid for child in children if "echo_node.backends.worker" in " ".join(child.cmdline())]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "node")


def newest_status(hub: Any) -> NodeStatus | None:
    return (hub.all(NodeStatus) or [None])[-1]


def ready_for(hub: Any, version: int) -> Callable[[], bool]:
    def ready() -> bool:
        status = newest_status(hub)
        return status is not None and status.policy_version == version and status.capacity > 0

    return ready


async def test_joins_fetches_samples_and_leaves(hub: Any, node: Node) -> None:
    async with node.running(hub.url):
        await hub.until(ready_for(hub, 0))
        assert newest_status(hub).capacity == 2 * 8
        first = await hub.lease(1, version=0)
        rollouts = await hub.finished(first)
        await hub.publish(1)
        second = await hub.lease(2, version=1)  # The node has to fetch the version of this lease first.
        later = await hub.finished(second)
    assert {r.policy_version_start for r in rollouts.values()} == {0}
    assert {r.policy_version_end for r in later.values()} == {1}
    for rollout in [*rollouts.values(), *later.values()]:
        assert 1 <= len(rollout.completion_ids) <= 6
        assert len(rollout.behavior_logprobs) == len(rollout.completion_ids)
    fetched = hub.all(Fetched)
    assert [f.policy_version for f in fetched] == [None, 1]
    assert all(f.swarm_bytes + f.web_seed_bytes > 0 for f in fetched), fetched
    proof = hub.all(Proof)[0]
    assert (proof.name, proof.backend) == ("tester", "llama_cpp")
    assert isinstance(hub.said[-1], Goodbye)
    assert node.engine_pids() == []


async def test_versions_are_pushed_as_deltas_and_sealed_with_new_keys(hub: Any, node: Node) -> None:
    async with node.running(hub.url):
        await hub.until(ready_for(hub, 0))
        await hub.publish(1, way=Way.INLINE)
        await push(hub, 1)
        await hub.until(ready_for(hub, 1))
        hub.run_keys = (*hub.run_keys, RunKey(key_id=2, key=bytes(32)))
        await hub.send(KeysRotated(run_keys=hub.run_keys))
        await hub.publish(2, parent=1, way=Way.BROADCAST)
        await push(hub, 2)
        await hub.until(ready_for(hub, 2))
        assert same_adapter(hub, node, 2)
        carriers = [open_offer(hub.offers[version], hub.me.public_key) for version in (1, 2)]
        assert {path.name for path in node.paths.carriers.iterdir()} >= {one.carrier_name for one in carriers}
        await hub.send(Unwanted(info_hashes=tuple(bytes.fromhex(one.info_hash) for one in carriers)))
        await hub.until(lambda: list(node.paths.carriers.iterdir()) == [])
        hub.said.clear()
        await hub.close()
        await hub.open()
        await hub.until(lambda: len(hub.all(Fetched)) == 3)
    pushed = {report.policy_version: report.pushed_bytes for report in hub.all(Fetched)}
    assert pushed == {None: 0, **{version: pushed_bytes(hub, version) for version in (1, 2)}}
    (proof,) = hub.all(Proof)
    assert proof.mesh_port != 0 and hub.all(Links) == [Links(node_ids=())]


async def push(hub: Any, version: int) -> None:
    for piece in hub.pieces(hub.offers[version]):
        await hub.send(piece)


def pushed_bytes(hub: Any, version: int) -> int:
    return sum(len(piece.data) for piece in hub.pieces(hub.offers[version]))


def same_adapter(hub: Any, node: Node, version: int) -> bool:
    name = "adapter_model.safetensors"
    here = node.paths.artefacts / hub.published(version).name / name
    return here.read_bytes() == (hub.published(version) / name).read_bytes()


async def test_pieces_are_relayed_to_peers_and_accepted_from_them(hub: Any, node: Node) -> None:
    """In this process, a mesh (links for relaying pieces) stands for the other node."""
    me, handed_on = Identity.generate(), asyncio.Queue[Piece]()
    mesh = MeshLinks(me)
    listener = SimpleNamespace(take=lambda piece, _: handed_on.put_nowait(piece), linked=lambda _: None)
    await mesh.open("127.0.0.1", 0, listener)
    mesh.set_keys(hub.run_keys)
    try:
        async with node.running(hub.url) as daemon:
            await hub.until(ready_for(hub, 0))
            await hub.send(MeshNews(peers=(MeshPeer(node_id=me.node_id, host="127.0.0.1", port=mesh.port, number=1),)))
            mesh.set_peers(
                [
                    MeshPeer(
                        node_id=daemon.snapshot().node_id,
                        host="127.0.0.1",
                        port=daemon.connections.mesh.port,
                        number=2,
                    )
                ]
            )
            await hub.until(lambda: Links(node_ids=(me.node_id,)) in hub.all(Links))
            await hub.publish(1, way=Way.BROADCAST)
            (piece,) = hub.pieces(hub.offers[1], hand_on=relay_tree.pack([(1, 0, b"")]))
            await hub.send(piece)
            async with asyncio.timeout(60):
                assert (await handed_on.get()).data == piece.data
            await hub.publish(2, way=Way.BROADCAST)
            (piece,) = hub.pieces(hub.offers[2])
            mesh.hand_on(piece, [(2, b"")])
            await hub.until(ready_for(hub, 2))
            # The reports may arrive later than the message that the node is ready.
            await hub.until(lambda: len(told_pieces(hub)) == 2)
    finally:
        await mesh.close()
    assert [(f.pushed_bytes > 0, f.mesh_bytes > 0) for f in hub.all(Fetched)] == [
        (False, False),
        (True, False),
        (False, True),
    ]
    assert [(have.pieces, have.wanted) for have in told_pieces(hub)] == [((0,), True), ((0,), True)]


def told_pieces(hub: Any) -> list[Have]:
    return [have for have in hub.all(Have) if have.pieces]


async def test_a_late_joiner_asks_for_the_keyframe(hub: Any, node: Node) -> None:
    for version in (1, 2):
        await hub.publish(version, announce=False, parent=version - 1 or None)
    async with node.running(hub.url):
        await hub.until(lambda: hub.all(KeyframeWanted))
        keyframe = await hub.offer(2, hub.published(2))
        await hub.send(PolicyPublished(policy_version=2, offer=keyframe))
        await hub.until(ready_for(hub, 2))
    assert same_adapter(hub, node, 2)
    assert {wanted.policy_version for wanted in hub.all(KeyframeWanted)} == {2}


async def test_a_long_final_message_of_the_hub_is_read_while_leases_are_held(hub: Any, node: Node) -> None:
    task = asyncio.create_task(node.daemon(hub.url).run())
    await hub.until(ready_for(hub, 0))
    for lease_id in range(1, 20):
        await hub.lease(lease_id, version=0, count=64)
    await hub.refuse(RefusalCode.BANNED, "banned " * 285)
    with pytest.raises(RefusedError, match="banned"):
        async with asyncio.timeout(60):
            await task


async def test_after_a_reconnect_unacknowledged_rollouts_come_again_and_receipts_are_asked_for(
    hub: Any, node: Node
) -> None:
    async with node.running(hub.url):
        await hub.until(ready_for(hub, 0))
        await hub.finished(await hub.lease(1, version=0, count=2))
        hub.acknowledges = False
        lease = await hub.lease(2, version=0, count=2)
        first = await hub.finished(lease)
        hub.said.clear()
        await hub.close()
        await hub.open()
        again = await hub.finished(lease)
        await hub.until(lambda: hub.all(ReceiptsWanted))
    assert {i: r.completion_ids.tolist() for i, r in first.items()} == {
        i: r.completion_ids.tolist() for i, r in again.items()
    }
    assert hub.all(ReceiptsWanted) == [ReceiptsWanted(rollout_ids=("1-1", "1-0"))]


async def test_a_restarted_node_returns_unfinished_leases_and_resends_finished_ones(hub: Any, node: Node) -> None:
    hub.acknowledges = False
    task = asyncio.create_task(node.daemon(hub.url).run())
    await hub.until(ready_for(hub, 0))
    done = await hub.lease(1, version=0)
    await hub.finished(done)
    spool = Spool(node.paths.hub(hub.me.public_key) / "spool.db")
    held = await hub.lease(2, version=9)  # The hub does not offer version 9, so the node returns the lease.
    await hub.until(lambda: hub.all(LeaseReturned))
    task.cancel()  # Simulate a kill of the node.
    await asyncio.wait({task})
    assert hub.all(LeaseReturned)[0].indices == held.indices
    spool.open()
    spool.write([_spool_lease(3, (0, 1))])
    assert spool.unfinished() == {3: (0, 1)}
    spool.close()
    fetched = set(hub.all(Fetched))
    hub.said.clear()
    hub.acknowledges = True
    async with node.running(hub.url):
        await hub.finished(done)
        await hub.until(lambda: hub.all(LeaseReturned))
        await hub.until(ready_for(hub, 0))
    returned = hub.all(LeaseReturned)[0]
    assert (returned.lease_id, returned.indices) == (3, (0, 1))
    assert set(hub.all(Fetched)) == fetched  # The base stayed on disk, so the node reports the old fetch again.


def _spool_lease(lease_id: int, indices: tuple[int, ...]) -> Any:
    from echo_node.core.effects import SpoolLease

    return SpoolLease(lease_id=lease_id, indices=indices)


async def test_an_engine_killed_for_memory_restarts_at_half_width(
    hub: Any, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The width must still be halved after the node's restart. SIGKILL and a changed counter stand for a kill by the
    kernel.
    """
    monkeypatch.setattr(process_memory, "kernel_kills", itertools.count().__next__)
    async with node.running(hub.url):
        await hub.until(ready_for(hub, 0))
        (first,) = node.engine_pids()
        os.kill(first, signal.SIGKILL)
        lease = await hub.lease(1, version=0)
        await hub.finished(lease)
        (second,) = node.engine_pids()
        assert newest_status(hub).capacity == 2 * 4
    assert first != second
    assert hub.all(LeaseReturned) == []
    hub.said.clear()
    async with node.running(hub.url):
        await hub.until(ready_for(hub, 0))
        assert newest_status(hub).capacity == 2 * 4


async def test_a_device_that_vanishes_and_comes_back(hub: Any, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change of device makes the node introduce itself to the hub again; the node's lease still finishes."""
    better = BackendChoice(name="llama_cpp", device="cpu", reason="a GPU is here")
    worse = BackendChoice(name="torch", device="cpu", reason="no GPU is here")
    there = [better]
    monkeypatch.setattr(registry, "choose", lambda *_, **__: there[-1])

    def introduced(*backends: str) -> bool:
        return [proof.backend for proof in hub.all(Proof)] == list(backends)

    async with node.running(hub.url, probe_s=0.1):
        await hub.until(ready_for(hub, 0))
        there.append(worse)
        lease = await hub.lease(1, version=0)
        os.kill(node.engine_pids()[0], signal.SIGABRT)  # End the engine as a driver does that has lost its device.
        await hub.until(lambda: introduced("llama_cpp", "torch"))
        await hub.finished(lease)
        there.append(better)
        await hub.until(lambda: introduced("llama_cpp", "torch", "llama_cpp"))
        await hub.finished(await hub.lease(2, version=0))
    assert hub.all(LeaseReturned) == []


async def test_a_router_with_another_port_is_told_to_the_hub(hub: Any, node: Node) -> None:
    async with node.running(hub.url) as daemon:
        await hub.until(lambda: hub.all(Proof))
        router, port = daemon.connections.swarm.router, daemon.connections.mesh.port
        assert hub.all(Proof)[0].mesh_port == port
        router.requested(port, [7])
        router.granted(7, 40_001, "UPnP")
        await hub.until(lambda: [proof.mesh_port for proof in hub.all(Proof)] == [port, 40_001])
        router.granted(7, 40_001, "UPnP")
    assert len(hub.all(Proof)) == 2


async def test_a_router_that_changes_its_port_often_is_followed_rarely(
    hub: Any, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "PORTS_AGAIN_S", 0.5)
    async with node.running(hub.url) as daemon:
        await hub.until(lambda: hub.all(Proof))
        router, port = daemon.connections.swarm.router, daemon.connections.mesh.port
        router.requested(port, [7])
        for external in (40_001, 40_002, 40_003):
            router.granted(7, external, "UPnP")
            await hub.until(lambda: hub.all(Proof)[-1].mesh_port != port)
        await hub.until(lambda: hub.all(Proof)[-1].mesh_port == 40_003)
    assert [proof.mesh_port for proof in hub.all(Proof)] == [port, 40_001, 40_003]


async def test_stopping_returns_unfinished_leases(hub: Any, node: Node) -> None:
    async with node.running(hub.url) as daemon:
        await hub.until(ready_for(hub, 0))
        leases = [await hub.lease(n, version=0, count=64, max_tokens=60, stop_ids=()) for n in range(1, 20)]
        await hub.until(lambda: hub.all(Rollout))
        daemon.request_stop("enough")
        await hub.until(lambda: hub.all(Goodbye))
    returned = {(m.lease_id, index) for m in hub.all(LeaseReturned) for index in m.indices}
    finished = {(r.lease_id, r.index) for r in hub.all(Rollout)}
    assert returned | finished == {(lease.lease_id, index) for lease in leases for index in lease.indices}
    assert not returned & finished
    positions = [i for i, m in enumerate(hub.said) if isinstance(m, NodeStatus) and m.activity == "draining"]
    assert positions[0] < min(i for i, m in enumerate(hub.said) if isinstance(m, LeaseReturned))


async def test_a_leaving_nodes_tokens_are_continued_by_the_next_node(hub: Any, node: Node, tmp_path: Path) -> None:
    """Sampled tokens must reach the hub before the lease is returned. The next node completes the rollouts as if one
    node had sampled everything.
    """
    node.stream_s = 0.01
    async with node.running(hub.url) as daemon:
        await hub.until(ready_for(hub, 0))
        begun = [await hub.lease(n, version=0, count=8, max_tokens=120, stop_ids=()) for n in range(1, 40)]
        await hub.until(lambda: len(hub.all(RolloutParts)) > 1)
        daemon.request_stop("enough")
        await hub.until(lambda: hub.all(Goodbye))
    drawn: dict[tuple[int, int], list[RolloutPart]] = {}
    returned: set[tuple[int, int]] = set()
    for message in hub.said:
        if isinstance(message, LeaseReturned):
            returned |= {(message.lease_id, index) for index in message.indices}
        for part in message.parts if isinstance(message, RolloutParts) else ():
            parts = drawn.setdefault((part.lease_id, part.index), [])
            assert part.start == sum(len(one.ids) for one in parts)
            assert (part.lease_id, part.index) not in returned
            parts.append(part)
    lease_id, index = min(returned & drawn.keys())
    lease, parts = begun[lease_id - 1], drawn[lease_id, index]
    prefix = LeasedPrefix(
        index=index,
        ids=np.concatenate([part.ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
    )
    again = {"indices": (index,), "max_tokens": 120, "stop_ids": (), "seed": lease.seed}
    async with Node(tmp_path / "next").running(hub.url):
        await hub.until(ready_for(hub, 0))
        (whole,) = (await hub.finished(await hub.lease(100, version=0, **again))).values()
        (rollout,) = (await hub.finished(await hub.lease(101, version=0, prefixes=(prefix,), **again))).values()
    assert rollout.completion_ids.tolist() == whole.completion_ids.tolist()
    assert (rollout.num_given, whole.num_given) == (len(prefix.ids), 0)


async def test_status_shows_the_states_of_all_rollouts(hub: Any, node: Node) -> None:
    async with node.running(hub.url) as daemon:
        await hub.until(ready_for(hub, 0))
        lease = await hub.lease(1, version=0)
        await hub.finished(lease)
        await hub.acknowledge("1-0", "1-1", state=ReceiptState.TRAINED)
        dropped = Receipt(rollout_id="1-2", state=ReceiptState.DROPPED, drop_reason=DropReason.STALE)
        await hub.send(Receipts(receipts=(dropped,)))
        # The counts of rollouts arrive with a later status.
        counted = {"received": 1, "trained": 2, "dropped": 1}
        await hub.until(lambda: counted.items() <= daemon.snapshot().rollouts.items())
        answer = await control.ask(node.paths.control_file, "status")
        assert answer["rollouts"]["dropped:stale"] == 1
        assert answer["rollouts"]["received"] == 1
        assert (answer["connected"], answer["policy_version"], answer["run_name"]) == (True, 0, "test run")
        assert set(answer["cage"]["holds"]) | set(answer["cage"]["lacks"]) == set(GUARDS)
        await control.ask(node.paths.control_file, "stop")
        await hub.until(lambda: hub.all(Goodbye))
    assert not node.paths.control_file.exists()


async def test_the_end_of_the_run_is_a_good_end(hub: Any, node: Node) -> None:
    task = asyncio.create_task(node.daemon(hub.url).run())
    await hub.until(ready_for(hub, 0))
    await hub.refuse(RefusalCode.FINISHED, "The run is finished.")
    async with asyncio.timeout(60):
        await task


async def test_another_run_on_the_same_hub_starts_fresh(hub: Any, node: Node) -> None:
    async with node.running(hub.url):
        await hub.until(ready_for(hub, 0))
        await hub.finished(await hub.lease(1, version=0))
        old_base = node.paths.artefacts / f"{hub.run_id}-base"
        assert old_base.exists()
        await hub.close()
        hub.said.clear()
        hub.run = "2"
        await hub.publish_base()
        await hub.open()
        await hub.until(ready_for(hub, 0))
        # The hub has forgotten the first rollout, so this one gets the same id.
        await hub.finished(await hub.lease(1, version=0))
    assert not old_base.exists()
    assert (node.paths.artefacts / f"{hub.run_id}-base").exists()


async def test_refusals_end_the_daemon(hub: Any, node: Node) -> None:
    hub.refusal = RefusedError("This hub admits only invited nodes.", do="Ask.", code=RefusalCode.BAD_TOKEN)
    with pytest.raises(RefusedError, match="admits only invited nodes") as caught:
        await node.daemon(hub.url).run()
    assert caught.value.code == "bad_token"
    assert Hubs(node.paths).all() == []


async def test_a_changed_hub_key_is_refused_until_trusted(hub: Any, node: Node) -> None:
    async with node.running(hub.url):
        await hub.until(ready_for(hub, 0))
    hub.me = Identity.generate()
    with pytest.raises(RefusedError, match="differs from the one that this node has stored") as caught:
        await node.daemon(hub.url).run()
    assert caught.value.code == "hub_key_changed"
    hub.offers.clear()
    hub.run = "2"
    await hub.publish_base()
    hub.said.clear()
    async with node.running(hub.url, pinned=None):
        await hub.until(ready_for(hub, 0))
    assert [record.hub_key for record in Hubs(node.paths).all()] == [hub.me.public_key]


async def test_a_damaged_spool_is_reported_at_once(hub: Any, node: Node) -> None:
    async with node.running(hub.url):
        await hub.until(ready_for(hub, 0))
    spool_file = node.paths.hub(hub.me.public_key) / "spool.db"
    spool_file.write_bytes(b"not a database, but long enough to look at" * 100)
    with pytest.raises(StorageError, match="spool"):
        await node.daemon(hub.url).run()
