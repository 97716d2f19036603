from __future__ import annotations

from echo_hub.core.accounting.effects import VersionRecorded
from echo_hub.spread.holdings import Arrival, Release
from echo_hub.store.reports import read_versions_by_transport
from echo_hub.store.store import Store
from echo_shared.wire.messages import Fetched, Way


def arrival(
    node_id: str, *, carrier: int = 1, version: int | None = 1, seconds: float = 1.0, swarm: int = 9
) -> Arrival:
    fetched = Fetched(
        info_hash=carrier.to_bytes(20),
        policy_version=version,
        seconds=seconds,
        swarm_bytes=swarm,
        web_seed_bytes=5,
    )
    return Arrival(node_id=node_id, fetched=fetched, broadcast_s=seconds)


def test_of_many_arrivals_the_first_of_each_node_and_artefact_counts(store: Store) -> None:
    store.apply([VersionRecorded(policy_version=1, published_at=1.0)], now=1.0)
    release = Release(policy_version=1, adapter_bytes=90, payload_bytes=14, carrier="delta", way=Way.SWARM)
    store.record_distribution([release, arrival("a"), arrival("b", swarm=0), arrival("a", seconds=8.0)], now=2.0)
    store.record_distribution([arrival("b", seconds=9.0), arrival("b", carrier=2, seconds=3.0)], now=3.0)
    store.record_distribution([arrival("a", carrier=3, version=None)], now=3.0)
    (version,) = store.versions_history(9)
    assert (version.payload_bytes, version.way) == (14, "swarm")
    assert version.fetches_by_transport == {"swarm": 2, "web_seed": 1}
    assert version.bytes_by_transport["swarm"] == 18 and version.bytes_by_transport["web_seed"] == 15
    assert (version.dissemination_p50_s, version.dissemination_max_s) == (1.0, 3.0)
    assert store.read(read_versions_by_transport)["swarm"] == 2, "the base model is not counted"
