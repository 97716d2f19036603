"""The broadcast planner on simulated links, with fleets small enough for a test."""

from __future__ import annotations

import pytest

from benchmarks.dissemination.simulated import HUB_UP, KINDS, NODE_UP, PAYLOAD_BYTES, SimulatedFleet, uplinks


def test_uplinks_are_what_the_kind_says() -> None:
    unequal = uplinks(20, "unequal", 7)
    assert set(uplinks(20, "equal", 7)) == {NODE_UP}
    assert min(unequal) == 8 and max(unequal) == 40 and unequal != sorted(unequal)
    assert unequal == uplinks(20, "unequal", 7), "the same seed gives the same fleet"


@pytest.mark.parametrize("kind", KINDS)
def test_no_version_spreads_sooner_than_the_bound(kind: str) -> None:
    fleet = SimulatedFleet(uplinks(6, kind, 7))
    assert fleet.bound_s >= PAYLOAD_BYTES / (HUB_UP * 1e6 / 8)
    took_s = fleet.spread(1)
    assert fleet.bound_s < took_s < 3 * fleet.bound_s
    (planner,) = fleet.planners
    assert 0 < planner.cpu_s < 10
