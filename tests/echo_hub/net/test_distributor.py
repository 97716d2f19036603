"""A distributor (which offers versions to nodes) with a real publisher, swarm and broadcaster. Nodes are called
directly, without a network.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from echo_hub.config.serving_sections import DisseminationConfig
from echo_hub.core.training import KEPT_VERSIONS
from echo_hub.net import distributor as distributor_module
from echo_hub.net import publisher as publisher_module
from echo_hub.net.broadcaster import Broadcaster
from echo_hub.net.distributor import Distributor
from echo_hub.net.gateway import NodeInfo
from echo_hub.net.live_nodes import LiveNodes
from echo_hub.net.send_queue import DeferredMessage, Rank
from echo_hub.run.directory import RunDirectory
from echo_hub.spread.holdings import Arrival, Release
from echo_shared.artefacts.manifest import Manifest, open_offer
from echo_shared.errors import RefusedError
from echo_shared.records.run import LiveNode
from echo_shared.swarm import read_torrent
from echo_shared.wire.messages import (
    MAX_MESH,
    ArtefactOffer,
    Fetched,
    FromHub,
    Have,
    KeyframeWanted,
    KeysRotated,
    Links,
    Mesh,
    Peers,
    Piece,
    PolicyPublished,
    RefusalCode,
    Unwanted,
    Way,
)
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION

_M = TypeVar("_M")
DEADLINE_S = 60.0


def node_info(node_id: str, *, host: str = "192.0.2.7", mesh_port: int = 7000) -> NodeInfo:
    return NodeInfo(
        node_id=node_id,
        public_key=bytes(32),
        name=node_id,
        backend="torch",
        device="cpu",
        host=host,
        hub_host="hub.example",
        swarm_port=0,
        mesh_port=mesh_port,
    )


class Nodes:
    """Records the messages to each node, and the hub's records except those about the base model."""

    def __init__(self, published: Any, *, links_each: int = MAX_MESH, **settings: Any) -> None:
        self.hub = published
        self.told: dict[str, list[FromHub]] = {}
        self.sent: list[tuple[str, FromHub]] = []
        self.dismissed: list[tuple[str, RefusalCode]] = []
        self.records: list[Release | Arrival] = []
        self.live = LiveNodes()
        self._news = asyncio.Event()
        self.distributor = Distributor(
            settings=DisseminationConfig(**{"uplink_mbit_s": 20.0, **settings}),
            publisher=published.publisher,
            broadcaster=Broadcaster(self),
            connections=self,
            books=self,
            live=self.live,
            links_each=links_each,
        )

    async def record(self, news: Sequence[Release | Arrival]) -> None:
        self.records += [one for one in news if isinstance(one, Release) or one.fetched.policy_version is not None]
        self._news.set()

    async def recorded(self, number: int) -> list[Release | Arrival]:
        await self.until(lambda: len(self.records) >= number)
        return self.records

    def send(self, node_id: str, message: FromHub) -> bool:
        if node_id not in self.told:
            return False
        self.told[node_id].append(message)
        self.sent.append((node_id, message))
        self._news.set()
        return True

    def push(self, node_id: str, deferred: DeferredMessage, rank: Rank) -> bool:
        message = deferred.build() if node_id in self.told else None
        return message is not None and self.send(node_id, message)

    def dismiss(self, node_id: str, code: RefusalCode, what: str) -> None:
        self.dismissed.append((node_id, code))

    async def join(self, *node_ids: str, has_base: bool = True, **about: Any) -> None:
        for node_id in node_ids:
            self.told[node_id] = []
            self.distributor.node_joined(node_info(node_id, **about))
            if has_base:
                await self.fetched(node_id, None)

    def leave(self, node_id: str) -> None:
        del self.told[node_id]
        self.distributor.node_left(node_id)

    async def link(self, *node_ids: str) -> None:
        for node_id in node_ids:
            others = tuple(other for other in node_ids if other != node_id)
            await self.distributor.node_said(node_id, Links(node_ids=others))

    def of(self, node_id: str, kind: type[_M]) -> list[_M]:
        return [message for message in self.told[node_id] if isinstance(message, kind)]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    def manifest(self, offer: ArtefactOffer) -> Manifest:
        return open_offer(offer, self.hub.identity.public_key)

    async def take(self, node_id: str, offer: ArtefactOffer) -> dict[int, Piece]:
        """Confirm each piece pushed to this node, and return all pieces."""
        layout = read_torrent(offer.torrent)
        taken: dict[int, Piece] = {}

        def has_more() -> bool:
            return len(self._pieces(node_id, layout.info_hash)) > len(taken)

        while len(taken) < len(layout.piece_hashes):
            await self.until(has_more)
            taken = self._pieces(node_id, layout.info_hash)
            await self.distributor.node_said(node_id, Have(info_hash=layout.info_hash, pieces=tuple(taken)))
        return taken

    def _pieces(self, node_id: str, info_hash: bytes) -> dict[int, Piece]:
        return {piece.index: piece for piece in self.of(node_id, Piece) if piece.info_hash == info_hash}

    async def fetched(self, node_id: str, version: int | None, **sizes: int) -> None:
        (info_hash, *_) = self.hub.publisher.info_hashes(version or 0)
        message = Fetched(
            info_hash=info_hash,
            policy_version=version,
            seconds=1.0,
            **{"swarm_bytes": 0, "web_seed_bytes": 0, **sizes},
        )
        await self.distributor.node_said(node_id, message)
        for known in self.hub.publisher.info_hashes(version or 0):
            await self.distributor.node_said(node_id, Have(info_hash=known, pieces=(), wanted=False))

    async def publish(self, version: int, adapter_dir: Path) -> None:
        await self.distributor.publish(version, adapter_dir)
        self.distributor.announce(version)


@pytest.fixture
async def make_nodes(hub: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Nodes]]:
    monkeypatch.setattr(distributor_module, "HOUSEKEEPING_S", 0.0)
    await hub.publisher.publish_base(model_dir)
    running: list[asyncio.Task[None]] = []

    def make(**settings: Any) -> Nodes:
        nodes = Nodes(hub, **settings)
        running.append(asyncio.create_task(nodes.distributor.run()))
        return nodes

    yield make
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


@pytest.fixture
async def nodes(make_nodes: Callable[..., Nodes]) -> Nodes:
    return make_nodes()


async def test_linked_nodes_are_broadcast_to_and_timed(nodes: Nodes, make_adapter: Callable[[int], Path]) -> None:
    await nodes.join("a", "b")
    await nodes.link("a", "b")
    await nodes.publish(1, make_adapter(1))
    (told,) = nodes.of("a", PolicyPublished)
    assert (told.policy_version, told.offer.way) == (1, Way.BROADCAST)
    carrier = nodes.hub.publisher.carrier(1)
    await nodes.until(lambda: any(piece.hand_on for node_id in "ab" for piece in nodes.of(node_id, Piece)))
    await nodes.until(lambda: nodes.records)
    manifest = nodes.manifest(told.offer)
    assert nodes.records == [
        Release(
            policy_version=1,
            adapter_bytes=manifest.total_bytes,
            payload_bytes=carrier.total_bytes,
            carrier="keyframe",
            way=Way.BROADCAST,
        )
    ]
    await nodes.distributor.node_said("b", Have(info_hash=carrier.info_hash, pieces=(0,)))
    status = nodes.distributor.status().newest
    assert status is not None
    assert 0 < status.share_arrived < 1
    await nodes.join("late")
    for node_id in ("a", "late", "a"):
        await nodes.fetched(node_id, 1, pushed_bytes=500, mesh_bytes=500)
    first, late, again = (news for news in await nodes.recorded(4) if isinstance(news, Arrival))
    assert first.broadcast_s is not None and first.broadcast_s >= 0
    assert (first.node_id, late.broadcast_s, again.broadcast_s) == ("a", None, None)
    status = nodes.distributor.status()
    assert (status.num_holding, status.num_connected, status.uplink_bytes_s) == (2, 3, 2.5e6)
    assert status.newest is not None and status.newest.under_way


async def test_without_links_a_small_version_is_sent_to_each(nodes: Nodes, make_adapter: Callable[[int], Path]) -> None:
    await nodes.join("a", "b")
    await nodes.distributor.node_said("a", Links(node_ids=("b",)))
    await nodes.publish(1, make_adapter(1))
    (told,), (other,) = nodes.of("a", PolicyPublished), nodes.of("b", PolicyPublished)
    assert told.offer.way is other.offer.way is Way.INLINE, (
        "a link reported by only one end is uncertain, so the hub sends inline"
    )
    for pieces in await asyncio.gather(nodes.take("a", told.offer), nodes.take("b", other.offer)):
        assert not any(piece.hand_on for piece in pieces.values())
        payload = b"".join(piece.data for _, piece in sorted(pieces.items()))
        carrier = nodes.hub.publisher.carrier(1)
        assert payload == b"".join((carrier.directory / path).read_bytes() for path, _ in carrier.layout.files)


async def test_standby_nodes_are_told_of_a_version_last(nodes: Nodes, make_adapter: Callable[[int], Path]) -> None:
    await nodes.join("a", "b", "c")
    nodes.live["a"] = LiveNode(standby="not needed")
    await nodes.publish(1, make_adapter(1))
    assert [node_id for node_id, message in nodes.sent if isinstance(message, PolicyPublished)] == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("pinned", "told", "joining"),
    [
        ("swarm", Way.SWARM, Way.SWARM),
        ("web_seed", Way.WEB_SEED, Way.WEB_SEED),
        ("inline", Way.INLINE, Way.SWARM),
        ("broadcast", Way.BROADCAST, Way.SWARM),
    ],
)
async def test_a_setting_pins_the_way(
    make_nodes: Callable[..., Nodes], make_adapter: Callable[[int], Path], pinned: str, told: Way, joining: Way
) -> None:
    nodes = make_nodes(way=pinned)
    await nodes.join("a")
    await nodes.publish(1, make_adapter(1))
    assert [message.offer.way for message in nodes.of("a", PolicyPublished)] == [told]
    assert nodes.distributor.offer(1, node_info("b")).way is joining


async def test_a_version_announced_to_no_node_has_no_way(
    make_nodes: Callable[..., Nodes], make_adapter: Callable[[int], Path]
) -> None:
    nodes = make_nodes(way="broadcast")
    await nodes.publish(1, make_adapter(1))
    await nodes.until(lambda: nodes.records)
    (release,) = nodes.records
    assert isinstance(release, Release) and release.way is None


async def test_nodes_that_read_the_hosts_memory_are_not_pushed_to(
    nodes: Nodes, make_adapter: Callable[[int], Path]
) -> None:
    await nodes.join("here", host="127.0.0.1")
    await nodes.join("there")
    await nodes.distributor.publish(1, make_adapter(1))
    # Lets a node on the hub's host read the version from shared memory.
    nodes.distributor.offer(1, node_info("here", host="127.0.0.1"))
    await nodes.publish(2, make_adapter(2))
    (local,), (remote,) = nodes.of("here", PolicyPublished), nodes.of("there", PolicyPublished)
    if local.offer.shared_memory is None:
        pytest.skip("no shared memory on this system")
    assert (local.offer.way, remote.offer.way) == (Way.SWARM, Way.INLINE)
    await nodes.take("there", remote.offer)
    carrier = nodes.hub.publisher.carrier(2)
    assert [piece for piece in nodes.of("here", Piece) if piece.info_hash == carrier.info_hash] == []
    await nodes.until(lambda: nodes.of("there", Mesh) and nodes.of("there", Mesh)[-1].peers == ())
    assert nodes.of("here", Mesh)[-1].peers == (), "it neither relays nor receives pieces"


async def test_deltas_use_a_common_parent_and_keyframes_go_to_nodes_that_ask(
    nodes: Nodes, make_adapter: Callable[[int], Path]
) -> None:
    await nodes.join("a", "b")
    await nodes.publish(1, make_adapter(1))
    for node_id in ("a", "b"):
        await nodes.fetched(node_id, 1)
    await nodes.publish(2, make_adapter(2))
    offer = nodes.of("a", PolicyPublished)[-1].offer
    assert offer.delta_parent == 1
    await nodes.until(lambda: any(isinstance(r, Release) and r.carrier == "delta" for r in nodes.records))
    await nodes.join("fresh")
    for node_id, version in (("fresh", 1), ("fresh", 2), ("fresh", 2), ("gone", 2), ("b", 2)):
        await nodes.distributor.node_said(node_id, KeyframeWanted(policy_version=version))
    await nodes.until(lambda: len(nodes.of("b", PolicyPublished)) == 3)
    (keyframe,) = nodes.of("fresh", PolicyPublished)
    assert keyframe.policy_version == 2, "version 1 is neither the newest nor lent to the node"
    assert nodes.manifest(keyframe.offer).carrier == "keyframe"
    assert (keyframe.offer.delta_parent, keyframe.offer.way) == (None, Way.INLINE)
    assert len(nodes.of("a", PolicyPublished)) == 2
    await asyncio.gather(nodes.take("fresh", keyframe.offer), nodes.take("b", keyframe.offer))
    for node_id in ("a", "fresh"):
        await nodes.fetched(node_id, 2)
    await nodes.distributor.publish(3, make_adapter(3))
    assert nodes.distributor.offer(3, node_info("a")).delta_parent == 2, "b holds no parent, so it takes a keyframe"


async def test_a_lent_version_stays_and_has_keyframes_too(nodes: Nodes, make_adapter: Callable[[int], Path]) -> None:
    await nodes.join("a")
    await nodes.publish(2, make_adapter(2))
    await nodes.distributor.keep_for_evaluation(1, make_adapter(1))
    await nodes.distributor.node_said("a", KeyframeWanted(policy_version=1))
    await nodes.until(lambda: any(told.policy_version == 1 for told in nodes.of("a", PolicyPublished)))
    assert nodes.distributor.has(1)
    await nodes.fetched("a", 2)
    assert nodes.of("a", Unwanted) == []


async def test_a_tenants_adapter_takes_no_version_from_nodes_that_use_it(
    nodes: Nodes, make_adapter: Callable[[int], Path]
) -> None:
    await nodes.join("a")
    await nodes.publish(1, make_adapter(1))
    nodes.distributor.lend(1, "a")
    for version in range(2, KEPT_VERSIONS + 2):
        await nodes.publish(version, make_adapter(version))
    assert nodes.distributor.has(1)
    await nodes.distributor.publish_for_tenant(FIRST_TENANT_VERSION, make_adapter(FIRST_TENANT_VERSION))
    assert nodes.distributor.has(1) and nodes.distributor.has(FIRST_TENANT_VERSION)


async def test_a_node_lent_a_delta_it_cannot_read_gets_the_keyframe(
    nodes: Nodes, make_adapter: Callable[[int], Path]
) -> None:
    """New nodes may need an older version to continue another node's prefix. Nodes that cannot apply the delta must get
    the whole version (keyframe).
    """
    await nodes.join("a")
    for version in (1, 2, 3):
        await nodes.publish(version, make_adapter(version))
        await nodes.fetched("a", version)
    await nodes.join("fresh", "other")
    assert nodes.distributor.lend(2, "fresh").delta_parent == 1
    for node_id in ("other", "fresh"):
        await nodes.distributor.node_said(node_id, KeyframeWanted(policy_version=2))
    await nodes.until(lambda: nodes.of("fresh", PolicyPublished))
    (keyframe,) = nodes.of("fresh", PolicyPublished)
    assert (keyframe.policy_version, keyframe.offer.delta_parent) == (2, None)
    await nodes.take("fresh", keyframe.offer)
    assert nodes.of("other", PolicyPublished) == [], "no version is lent to it"
    assert not any(
        set(nodes.hub.publisher.info_hashes(2)) & set(told.info_hashes) for told in nodes.of("fresh", Unwanted)
    )


async def test_a_keyframe_of_a_damaged_version_is_sent_on_request(
    nodes: Nodes, make_adapter: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    await nodes.join("a")
    await nodes.publish(1, make_adapter(1))
    await nodes.fetched("a", 1)
    await nodes.publish(2, make_adapter(2))
    run = RunDirectory(nodes.hub.run_dir)
    (file,) = run.artefacts.glob("*-v000002/adapter_config.json")
    file.write_text("{}")
    await nodes.distributor.keep_for_evaluation(1, make_adapter(1))
    await nodes.join("early", "other", "late")
    await nodes.distributor.node_said("early", KeyframeWanted(policy_version=2))
    await nodes.distributor.node_said("other", KeyframeWanted(policy_version=1))
    await nodes.until(lambda: nodes.of("other", PolicyPublished))
    assert "Policy version 2 has no keyframe for early" in caplog.text, "the learner's files are missing"
    assert nodes.of("early", PolicyPublished) == []
    shutil.copytree(make_adapter(2), run.adapter(2))
    await nodes.distributor.node_said("late", KeyframeWanted(policy_version=2))
    await nodes.until(lambda: nodes.of("late", PolicyPublished))
    (keyframe,) = nodes.of("late", PolicyPublished)
    delta = nodes.of("a", PolicyPublished)[-1]
    assert (delta.offer.delta_parent, keyframe.offer.delta_parent) == (1, None)
    assert nodes.manifest(keyframe.offer).content == nodes.manifest(delta.offer).content
    assert "has been damaged" in caplog.text


async def test_versions_that_no_node_fetches_are_unwanted(nodes: Nodes, make_adapter: Callable[[int], Path]) -> None:
    await nodes.join("a", "b")
    await nodes.publish(1, make_adapter(1))
    await nodes.publish(2, make_adapter(2))
    await nodes.fetched("a", 2)
    await nodes.fetched("b", 1)
    hashes = nodes.hub.publisher.info_hashes(1)
    await nodes.until(lambda: nodes.of("a", Unwanted) and nodes.of("b", Unwanted))
    assert {message.info_hashes for message in nodes.of("a", Unwanted)} == {hashes}
    await nodes.join("c")
    await nodes.until(lambda: nodes.of("c", Unwanted))


async def test_a_keyframe_wanted_by_several_nodes_is_one_broadcast(
    nodes: Nodes, make_adapter: Callable[[int], Path]
) -> None:
    await nodes.join("a", "b", "c")
    await nodes.link("a", "b", "c")
    await nodes.publish(1, make_adapter(1))
    await nodes.fetched("a", 1)
    await nodes.publish(2, make_adapter(2))
    for node_id in "abc":  # All nodes already have both versions, so no transfer is running.
        for version in (1, 2):
            (info_hash,) = nodes.hub.publisher.info_hashes(version)
            await nodes.distributor.node_said(node_id, Have(info_hash=info_hash, pieces=(), wanted=False))
    for node_id in ("b", "c"):
        await nodes.distributor.node_said(node_id, KeyframeWanted(policy_version=2))
    await nodes.until(lambda: all(nodes.of(one, PolicyPublished)[-1].offer.delta_parent is None for one in "bc"))
    offers = [nodes.of(one, PolicyPublished)[-1].offer for one in "bc"]
    assert [offer.way for offer in offers] == [Way.BROADCAST] * 2
    keyframe = read_torrent(offers[0].torrent).info_hash
    await nodes.until(lambda: any(p.hand_on and p.info_hash == keyframe for one in "bc" for p in nodes.of(one, Piece)))


async def test_a_retired_version_is_unwanted_and_no_longer_pushed(
    nodes: Nodes, make_adapter: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "KEPT_VERSIONS", 1)
    await nodes.join("a")
    await nodes.publish(1, make_adapter(1))
    hashes = nodes.hub.publisher.info_hashes(1)
    await nodes.publish(2, make_adapter(2))
    assert nodes.hub.publisher.published() == (1, 2), "the node may still be fetching it"
    assert nodes.of("a", Unwanted) == []
    await nodes.publish(3, make_adapter(3))
    assert nodes.hub.publisher.published() == (2, 3), "but no version stays forever"
    await nodes.until(lambda: nodes.of("a", Unwanted))
    assert nodes.of("a", Unwanted)[0].info_hashes == hashes
    await nodes.fetched("a", 3)
    await nodes.publish(4, make_adapter(4))
    assert nodes.hub.publisher.published() == (4,)


async def test_reports_of_unpublished_versions_are_ignored(nodes: Nodes) -> None:
    await nodes.join("a")
    message = Fetched(info_hash=bytes(20), policy_version=3, seconds=1.0, swarm_bytes=0, web_seed_bytes=0)
    await nodes.distributor.node_said("a", message)
    assert nodes.records == []
    assert nodes.distributor.status().num_holding == 0


async def test_nodes_hear_of_those_to_link_with(nodes: Nodes) -> None:
    def peers(node_id: str) -> dict[str, int] | None:
        said = nodes.of(node_id, Mesh)
        return {peer.node_id: peer.port for peer in said[-1].peers} if said else None

    await nodes.join("a")
    await nodes.join("deaf", mesh_port=0)
    assert {peer.node_id: peer.port for peer in nodes.distributor.mesh_for(node_info("deaf"))} == {"a": 7000}
    await nodes.until(lambda: peers("a") == {"deaf": 0})
    await nodes.join("local", host="127.0.0.1")
    await nodes.until(lambda: peers("deaf") == {"a": 7000, "local": 0})
    assert nodes.of("local", Mesh) == [], "its Welcome already named the peers"
    await nodes.join("b", host="192.0.2.8")
    await nodes.until(lambda: peers("a") == {"deaf": 0, "local": 0, "b": 7000})
    assert nodes.of("a", Mesh)[-1].peers[-1].host == "192.0.2.8"
    nodes.leave("b")
    await nodes.until(lambda: peers("a") == {"deaf": 0, "local": 0})


async def test_in_a_large_fleet_each_node_is_linked_with_a_few(make_nodes: Callable[..., Nodes]) -> None:
    nodes = make_nodes(links_each=4)
    names = [f"n{number}" for number in range(12)]
    await nodes.join(*names)
    await nodes.join("deaf", mesh_port=0)
    told = {name: nodes.distributor.mesh_for(node_info(name)) for name in [*names, "deaf"]}
    assert all(2 <= len(peers) <= 4 for peers in told.values())
    for name, peers in told.items():
        for peer in peers:
            assert name in {other.node_id for other in told[peer.node_id]}, (
                "both ends of a link are told, whichever connects"
            )
    numbers = {peer.node_id: peer.number for peers in told.values() for peer in peers}
    assert len(set(numbers.values())) == len(numbers) == 13


async def test_a_node_without_the_base_gets_no_pushes(nodes: Nodes, make_adapter: Callable[[int], Path]) -> None:
    await nodes.join("busy", has_base=False)
    await nodes.join("ready")
    await nodes.publish(1, make_adapter(1))
    (told,), (other,) = nodes.of("ready", PolicyPublished), nodes.of("busy", PolicyPublished)
    assert (told.offer.way, other.offer.way) == (Way.INLINE, Way.SWARM)
    await nodes.take("ready", told.offer)
    assert nodes.of("busy", Piece) == []
    await nodes.fetched("busy", None)
    await nodes.publish(2, make_adapter(2))
    offer = nodes.of("busy", PolicyPublished)[-1].offer
    assert offer.way is Way.INLINE
    await nodes.take("busy", offer)


async def test_a_banned_node_is_sent_away_and_the_others_get_a_new_key(
    nodes: Nodes, make_adapter: Callable[[int], Path]
) -> None:
    await nodes.join("a", "bad")
    await nodes.publish(1, make_adapter(1))
    before = nodes.distributor.run_keys()
    nodes.distributor.bar([])
    assert (nodes.dismissed, nodes.of("a", KeysRotated)) == ([], [])
    nodes.distributor.bar(["bad", "never seen"])
    nodes.distributor.bar(["bad", "never seen"])
    assert nodes.dismissed == [("bad", RefusalCode.BANNED)] * 2, "the bar holds while the node is connected"
    (news,) = nodes.of("a", KeysRotated)
    assert nodes.of("bad", KeysRotated) == []
    assert set(before) < set(news.run_keys) == set(nodes.distributor.run_keys())
    with pytest.raises(RefusedError, match="banned") as refused:
        nodes.distributor.admit("bad")
    assert refused.value.code == RefusalCode.BANNED
    nodes.distributor.admit("a")
    await nodes.publish(2, make_adapter(2))
    key_id = nodes.manifest(nodes.of("a", PolicyPublished)[-1].offer).key_id
    assert key_id not in {key.key_id for key in before}
    nodes.distributor.bar([])
    nodes.distributor.admit("bad")
    assert len(nodes.of("a", KeysRotated)) == 1


async def test_a_rotated_key_seals_the_next_version_and_nodes_have_it(
    nodes: Nodes, make_adapter: Callable[[int], Path]
) -> None:
    await nodes.join("a", "bad")
    nodes.distributor.bar(["bad"])
    nodes.distributor.rotate_key()
    first, second = nodes.of("a", KeysRotated)
    before, newest = (max(key.key_id for key in news.run_keys) for news in (first, second))
    assert newest > before and nodes.of("bad", KeysRotated) == []
    await nodes.publish(1, make_adapter(1))
    assert nodes.manifest(nodes.of("a", PolicyPublished)[-1].offer).key_id == newest


async def test_new_peers_are_introduced(nodes: Nodes) -> None:
    await nodes.join("a", "b")
    nodes.distributor.introduce(bytes(20), ("192.0.2.9", 6881), ("b", "gone"))
    assert nodes.of("b", Peers) == [Peers(info_hash=bytes(20), peers=(("192.0.2.9", 6881),))]
    assert nodes.of("a", Peers) == []


async def test_a_restart_seeds_again_and_offers_what_was_published(
    nodes: Nodes, open_hub: Callable[..., Any], make_adapter: Callable[[int], Path], model_dir: Path
) -> None:
    await nodes.distributor.publish_base(model_dir)
    await nodes.publish(1, make_adapter(1))
    again = Nodes(await open_hub())
    running = asyncio.create_task(again.distributor.run())
    await again.distributor.open()
    await again.distributor.publish_base(model_dir)
    await again.distributor.publish(1, make_adapter(1))
    node = node_info("a")
    for version in (0, 1):
        assert again.distributor.offer(version, node).manifest == nodes.distributor.offer(version, node).manifest
    await again.join("a")
    await again.fetched("a", 1)
    (arrival,) = await again.recorded(1)
    assert isinstance(arrival, Arrival) and arrival.broadcast_s is None, "it was announced before the restart"
    assert again.distributor.status().num_holding == 1
    running.cancel()


async def test_the_pages_learn_how_many_links_a_node_has(nodes: Nodes) -> None:
    await nodes.join("a", "b")
    nodes.live["a"] = LiveNode()
    await nodes.distributor.node_said("a", Links(node_ids=("b", "c"), punched=("c",)))
    # Node b is not in `live` any more: it has just left.
    await nodes.distributor.node_said("b", Links(node_ids=("a",)))
    assert (nodes.live["a"].num_links, nodes.live["a"].num_punched) == (2, 1)
    assert nodes.live.keys() == {"a"}
