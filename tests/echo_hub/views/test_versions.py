from __future__ import annotations

from typing import Any

from echo_hub.dashboard.model import DisseminationView
from echo_hub.spread.holdings import Arrival, DistributionStatus, Release, VersionProgress
from echo_hub.store.tallies import SOURCES, TRANSPORTS
from echo_hub.views.versions import dissemination_view
from echo_shared.wire.messages import Fetched, Way


async def test_versions_and_how_they_reached_the_nodes(hub: Any) -> None:
    await hub.join("a")
    await hub.train_to_the_end()
    for node_id, version, swarm_bytes, seconds in (
        ("a", 1, 900, 1.0),
        ("b", 1, 0, 3.0),
        ("a", 2, 2_000, 2.0),
        ("a", None, 0, 60.0),
    ):
        fetched = Fetched(
            info_hash=bytes([version or 0] * 20),
            policy_version=version,
            seconds=seconds,
            swarm_bytes=swarm_bytes,
            web_seed_bytes=100,
        )
        arrival = Arrival(node_id=node_id, fetched=fetched, broadcast_s=seconds)
        hub.driven.store.record_distribution([arrival], now=900.0)
    release = Release(policy_version=2, adapter_bytes=2_000, payload_bytes=700, carrier="delta", way=Way.SWARM)
    hub.driven.store.record_distribution([release], now=900.0)
    view = await hub.pages.run_view()
    newest, oldest = view.versions
    assert (newest.record.policy_version, newest.size_bytes, newest.record.dissemination_p50_s) == (2, 2_000, 2.0)
    assert (oldest.record.policy_version, oldest.size_bytes, oldest.record.dissemination_max_s) == (1, 1_000, 3.0)
    assert oldest.record.fetches_by_transport == {"swarm": 1, "web_seed": 1}
    assert (oldest.record.dissemination_p50_s, oldest.record.dissemination_p95_s) == (1.0, 3.0)
    assert oldest.record.payload_bytes is None
    assert (newest.record.payload_bytes, newest.record.carrier, newest.record.way) == (700, "delta", "swarm")
    assert oldest.record.bytes_by_transport == dict.fromkeys(SOURCES, 0) | {"swarm": 900, "web_seed": 200}
    by_transport = dict.fromkeys(TRANSPORTS, 0) | {"swarm": 2, "web_seed": 1}
    assert view.fetches_by_transport == by_transport, "the base model is not counted"


async def test_a_version_on_its_way(hub: Any) -> None:
    release = Release(policy_version=3, adapter_bytes=900, payload_bytes=300, carrier="delta", way=Way.BROADCAST)
    progress = VersionProgress(release=release, since_s=0.5, num_told=4, seconds=(0.25,), share_arrived=0.75)
    hub.said["distribution"] = DistributionStatus(
        newest=progress, num_holding=1, num_connected=5, uplink_bytes_s=2.5e6, newest_complete=2
    )
    view = await hub.pages.run_view()
    assert view.dissemination == DisseminationView(
        policy_version=3,
        carrier="delta",
        way="broadcast",
        size_bytes=900,
        payload_bytes=300,
        since_s=0.5,
        num_told=4,
        num_reached=1,
        share_arrived=0.75,
    )
    assert view.newest_complete == 2
    assert view.dissemination.under_way
    assert (view.nodes_on_newest, view.nodes_connected, view.uplink_bytes_s) == (1, 5, 2.5e6)


def test_an_adapter_in_shared_memory_has_no_way() -> None:
    release = Release(policy_version=1, adapter_bytes=9, payload_bytes=9, carrier="keyframe", way=None)
    progress = VersionProgress(release=release, since_s=0.0, num_told=0, seconds=(), share_arrived=1.0)
    assert dissemination_view(progress).way == "shared_memory"
