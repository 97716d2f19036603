"""The planner on simulated links, with fleets small enough for a test."""

from __future__ import annotations

import pytest

from benchmarks.dissemination.simulated import (
    HEADLINE_KINDS,
    HUB_UP,
    KINDS,
    NODE_UP,
    NUM_NODES,
    PAYLOAD_BYTES,
    Kind,
    SimulatedCase,
    SimulatedFleet,
    cases,
    uplinks,
)

MBIT = 1e6 / 8


def test_every_size_is_measured_with_every_kind() -> None:
    assert {(case.num_nodes, case.kind) for case in cases()} == {(n, kind) for n in NUM_NODES for kind in KINDS}
    assert len({case.name for case in cases()}) == len(cases())
    assert set(HEADLINE_KINDS) < set(KINDS)


def test_uplinks_match_the_kind_of_fleet() -> None:
    equal, unequal, silent = (
        uplinks(SimulatedCase(num_nodes=20, kind=kind), 7) for kind in ("equal", "unequal", "some hand on nothing")
    )
    assert set(equal) == {NODE_UP * MBIT}
    assert min(unequal) == 8 * MBIT and max(unequal) == 40 * MBIT and unequal != sorted(unequal)
    assert sum(up < MBIT for up in silent) == 2
    assert unequal == uplinks(SimulatedCase(num_nodes=20, kind="unequal"), 7), "the same seed gives the same fleet"


@pytest.mark.parametrize("kind", KINDS)
def test_all_nodes_get_the_payload_but_not_before_the_lower_bound(kind: Kind) -> None:
    fleet = SimulatedFleet(SimulatedCase(num_nodes=6, kind=kind), 7)
    assert fleet.bound_s >= PAYLOAD_BYTES / (HUB_UP * MBIT)
    took_s = fleet.spread(1)
    assert fleet.bound_s < took_s < 3 * fleet.bound_s
    assert 1 <= fleet.num_pushed < 6
    (recording,) = fleet.recordings
    assert 0 < recording.cpu_s() < 10
    assert {method for method, _, _ in recording.asked} == {"join", "have", "plan"}
    assert sum(method == "join" for method, _, _ in recording.asked) == 6
