"""The whole dissemination benchmark, scaled down: a real hub, real nodes, Echo and all baselines."""

import pytest

from benchmarks.dissemination import cases, links
from benchmarks.dissemination.cases import Case, FleetCases
from benchmarks.dissemination.links import LinkSet
from benchmarks.dissemination.rounds import SHARES, measure_fleet
from benchmarks.dissemination.wan import homes
from benchmarks.dissemination.wan.homes import WanSet
from benchmarks.harness.progress import Progress

TOY = FleetCases(
    links=LinkSet(hub_up=100, node_down=100, node_up=40),
    num_nodes=2,
    cases=(Case(size_bytes=500_000, sides=("http", "libtorrent", "echo", "echo swarm"), repeats=2),),
)


@pytest.mark.slow
@pytest.mark.skipif(bool(links.lacking()), reason=links.lacking())
async def test_every_side_brings_it_to_every_node() -> None:
    found = await measure_fleet(TOY, seed=1, progress=Progress(cases.plan([TOY])))
    rows = {row["side"]: row for row in found}
    assert rows.keys() == set(TOY.cases[0].sides)
    for row in rows.values():
        assert (row["nodes"], row["runs"]) == (2, 2)
        assert row["worst_s"] >= row["seconds"] > 0
        assert row["payload_bytes"] == pytest.approx(500_000, rel=0.01)
        assert row["ratio_to_bound"] == pytest.approx(row["seconds"] / row["bound_s"])
    for side in ("echo", "echo swarm"):
        assert sum(rows[side][name] for name in SHARES) >= 0.99
    assert rows["echo swarm"]["swarm"] >= 0.99
    assert min(row["seconds"] for row in rows.values()) > rows["echo"]["bound_s"]


@pytest.mark.slow
@pytest.mark.skipif(not homes.can_emulate(), reason="an emulated network takes root, iproute2 and TUN devices")
async def test_over_an_emulated_network() -> None:
    fleet = FleetCases(
        links=WanSet(loss=0.01), num_nodes=2, cases=(Case(size_bytes=200_000, sides=("http", "echo"), repeats=2),)
    )
    for row in await measure_fleet(fleet, seed=1, progress=Progress(cases.plan([fleet]))):
        assert row["seconds"] > row["bound_s"]
        assert (row["loss"], row["nodes"], row["hub_up_mbit_s"]) == (0.01, 2, 100)
        assert 0 < row["emulator_cores"] < 1
