"""Every fault, injected into real hubs and nodes: all transfers still end well."""

import pytest

from benchmarks.dissemination import faults, links
from benchmarks.dissemination.faults import FAULTS, WAYS, Fault, try_one

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not links.can_shape(), reason="namespaces with shaped links take root and iproute2"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
async def test_every_honest_node_ends_with_the_very_files(
    monkeypatch: pytest.MonkeyPatch, fault: Fault, way: str
) -> None:
    # Midway is an eighth after the beginning, because moments come late on a busy machine.
    monkeypatch.setattr(faults, "PAYLOAD_BYTES", 6_000_000)
    monkeypatch.setattr(faults, "MIDWAY_S", 0.3)
    tried = await try_one(fault, way, seed=1)
    assert tried["survived"]
    assert tried["pushed"] + tried["mesh"] + tried["swarm"] + tried["web_seed"] > 0
    if fault.name == "peers' ports are blocked":
        assert tried["mesh"] == tried["swarm"] == 0
