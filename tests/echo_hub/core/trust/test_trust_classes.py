"""Numerics classes (kinds of engine): when the rounding of a class is measured, and what the evidence of its nodes
shows together.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from echo_hub.core.accounting.effects import (
    CheckRollout,
    CoarseClassesRecorded,
    MeasureNumerics,
    SendLease,
    StandingRecorded,
    TrustDecided,
)
from echo_hub.core.accounting.events import (
    NodeConnected,
    NodeReported,
    NumericsMeasured,
)
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot
from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.numerics import NumericsClass
from echo_hub.core.trust.rate import is_drawn
from echo_hub.core.trust.settings import TrustSettings
from echo_hub.core.trust.standing import Decision, StandingState
from echo_shared.records.rollout import DrawnSpan, RolloutPayload
from echo_shared.wire.messages import FinishReason
from tests.echo_hub.core.trust.checked_run import (
    CHECKS_ALL,
    F32,
    HONEST,
    SETTINGS,
    arrive,
    join,
    name,
    proven,
    standing_of,
    verdict,
)
from tests.echo_hub.core.trust.simulated import engine, rollouts


def measured_of(bench) -> list[tuple[str, int]]:
    return [(effect.rounding, effect.policy_version) for effect in bench.of(MeasureNumerics)]


def test_a_class_is_measured_before_its_first_check(world) -> None:
    bench = world(groups_per_step=8)
    first, second, *_ = join(bench, "a")
    bench.tell(bench.arrival(first, 0))
    kinds = [type(effect) for effect in bench.effects if isinstance(effect, MeasureNumerics | CheckRollout)]
    assert kinds == [MeasureNumerics, CheckRollout] and measured_of(bench) == [("f32", 0)]
    bench.tell(bench.arrival(second, 0))
    assert bench.of(CheckRollout) and measured_of(bench) == [], "measured once for a version"


@pytest.mark.parametrize("said", [0, 10**9])
def test_a_class_is_measured_once_its_node_reports(world, said: int) -> None:
    """Measurements must precede the class's first rollout and use a published version, even if the node reports an
    unknown version.
    """
    bench = world()
    bench.tell(
        NodeConnected(node_id="a", numerics=F32._replace(precision="")),
        NodeReported(node_id="a", capacity=8, policy_version=said, precision="q8_0"),
    )
    assert measured_of(bench) == [("q8_0", 0)]


def test_each_rounding_is_measured_and_not_each_name(world) -> None:
    bench = world(groups_per_step=8)
    found = []
    for number, precision in enumerate(("f32", "q8_0", "float32", "q8_0", "made-up", "")):
        lease = join(bench, f"n{number}", NumericsClass("torch", precision, "cpu"), capacity=1)[-1]
        bench.tell(bench.arrival(lease, 0))
        found += measured_of(bench)
    assert found == [("f32", 0), ("q8_0", 0), ("q4_0", 0)]


def test_a_class_is_measured_again_as_the_policy_changes(world) -> None:
    """Scales become outdated as the policy changes, so they are measured again whenever the version number has grown by
    a quarter.
    """
    bench = world()
    trust, found = bench.coordinator._trust, []
    for version in range(40):
        trust._measure(F32, version)
        found += [effect.policy_version for effect in trust._out.take() if isinstance(effect, MeasureNumerics)]
    assert found == [0, 1, 2, 3, 4, 6, 8, 11, 14, 18, 23, 29, 37]


def test_an_older_version_is_not_measured_again(world) -> None:
    bench = world()
    trust = bench.coordinator._trust
    for version in (40, 7, 50, 3):
        trust._measure(F32, version)
    assert [effect.policy_version for effect in trust._out.take()] == [40]


def test_a_measurement_that_failed_is_tried_again(world) -> None:
    """Failed measurements are repeated with the next version. Successful ones are repeated only after a quarter more
    versions.
    """
    trust = world().coordinator._trust
    for version in (40, 41, 42):
        trust._measure(F32, version)
        trust.measured(NumericsMeasured(rounding="f32", policy_version=version, evidence=None))
    assert [effect.policy_version for effect in trust._out.take()] == [40, 41, 42]


def test_the_class_of_each_node_that_sampled_a_part_is_measured(world) -> None:
    """Node b continues node a's prefix. Evidence about node a's tokens is judged at the scale of node a's class, so
    that class is measured too.
    """
    bench = world(proven("a", numerics=F32._replace(precision="q8_0")), proven("b"), groups_per_step=32)
    lease = next(each for each in join(bench, "b") if is_drawn(SETTINGS.secret, name(each), SETTINGS.least_checked))
    payload = RolloutPayload(
        completion_ids=np.array([5, 7, 9], np.int32),
        behavior_logprobs=np.full(3, -0.5, np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=0.1,
        spans=(
            DrawnSpan(node_id="a", policy_version=0, num_tokens=2),
            DrawnSpan(node_id="b", policy_version=0, num_tokens=1),
        ),
    )
    bench.tell(bench.arrival(lease, 0, payload=payload))
    assert bench.of(CheckRollout)
    assert sorted(rounding for rounding, _ in measured_of(bench)) == ["f32", "q8_0"]


@pytest.mark.parametrize("trust", [TrustSettings(), replace(SETTINGS, by_nodes=True)])
def test_without_a_verifier_nothing_is_measured(world, trust: TrustSettings) -> None:
    bench = world(trust=trust)
    for lease in join(bench, "a")[:2]:
        arrive(bench, lease)
        assert measured_of(bench) == []


def test_a_measurement_overrides_the_assumed_scales(world) -> None:
    """The engine rounds more coarsely than is assumed for f32, so without the measurement the node would be
    convicted.
    """
    for shown, state in ((engine(7, 0.4), StandingState.PROVEN), (None, StandingState.QUARANTINED)):
        bench = world(groups_per_step=8)
        leases = join(bench, "a")
        bench.tell(NumericsMeasured(rounding="f32", policy_version=0, evidence=shown))
        for lease, evidence_ in zip(leases[:4], rollouts(9, 4, 0.4, length=100), strict=True):
            arrive(bench, lease)
            verdict(bench, lease, evidence_)
            if bench.of(TrustDecided):
                break
        assert standing_of(bench, "a").state is state


def check_each(world, shown: dict[str, Evidence], *, origin: str = ""):
    """Check one rollout of each node, all of one class but of different groups; return the coordinator under test
    (`Bench`) and its decisions. Nodes named `coarse ...` share the address `origin`, if given; all others have their
    own.
    """
    bench, groups = world(groups_per_step=64, trust=CHECKS_ALL), set()
    decided: list[tuple[str, Decision]] = []
    for node_id, evidence_ in shown.items():
        address = origin if origin and node_id.startswith("coarse") else f"at {node_id}"
        bench.tell(
            NodeConnected(node_id=node_id, numerics=F32, origin=address),
            NodeReported(node_id=node_id, capacity=8, policy_version=0),
        )
        sent = [lease for lease in bench.of(SendLease) if lease.node_id == node_id and lease.group_id not in groups]
        lease = sent[0]
        groups.add(lease.group_id)
        arrive(bench, lease)
        verdict(bench, lease, evidence_)
        decided += [(one.node_id, one.decision) for one in bench.of(TrustDecided)]
    return bench, decided


def coarse_class(world, number: int, *, origin: str = ""):
    """Let the hub check four honest nodes of a numerics class, and `number` nodes of it that round seventy times as
    coarsely.
    """
    fine = {f"fine {place}": HONEST for place in range(4)}
    coarse = {f"coarse {place}": engine(60 + place, 0.4, 400) for place in range(number)}
    return check_each(world, {**fine, **coarse}, origin=origin)


def test_a_fault_of_a_whole_class_quarantines_no_node(world) -> None:
    """Two nodes are quarantined for coarse rounding. A third node that rounds as coarsely shows that the class is at
    fault, which releases both.
    """
    bench, decided = coarse_class(world, 3)
    assert decided == [
        ("coarse 0", Decision.QUARANTINED),
        ("coarse 1", Decision.QUARANTINED),
        ("coarse 0", Decision.RELEASED),
        ("coarse 1", Decision.RELEASED),
    ]
    rows = {record.row.node_id: record.row for record in bench.of(StandingRecorded)}
    assert all(rows[f"coarse {number}"].state is StandingState.SUSPECT for number in range(3))
    assert all("the cause is that engine" in rows[f"coarse {number}"].reason for number in range(3))
    status = bench.coordinator.status().trust
    assert status.quarantined == 0 and status.suspended == ()
    assert len(status.coarser) == 1 and status.coarser[0].startswith("torch/f32/cpu (draws ")


def test_from_then_on_the_class_is_known_to_be_coarser(world) -> None:
    bench, _ = coarse_class(world, 3)
    bench.tell(
        NodeConnected(node_id="new", numerics=F32, origin="elsewhere"),
        NodeReported(node_id="new", capacity=4, policy_version=0),
    )
    for lease, shown in zip(bench.of(SendLease), rollouts(10, 4, 0.4, length=100), strict=False):
        arrive(bench, lease)
        verdict(bench, lease, shown)
        assert not bench.of(TrustDecided)
    assert standing_of(bench, "new").num_checked > 1


def test_a_restarted_hub_knows_which_classes_are_coarser(world) -> None:
    bench, _ = coarse_class(world, 3)
    (record,) = bench.of(CoarseClassesRecorded)
    restarted = world(snapshot=CoordinatorSnapshot(coarse_classes=record.classes), trust=CHECKS_ALL)
    assert restarted.coordinator.status().trust.coarser == bench.coordinator.status().trust.coarser


def test_two_nodes_that_round_alike_stay_in_quarantine(world) -> None:
    bench, decided = coarse_class(world, 2)
    assert decided == [("coarse 0", Decision.QUARANTINED), ("coarse 1", Decision.QUARANTINED)]
    assert bench.coordinator.status().trust.coarser == ()


def test_three_nodes_of_one_address_are_no_class(world) -> None:
    bench, decided = coarse_class(world, 3, origin="theirs")
    assert decided == [(f"coarse {place}", Decision.QUARANTINED) for place in range(3)]
    assert bench.coordinator.status().trust.quarantined == 3


def test_three_nodes_that_forge_everything_are_no_class(world) -> None:
    """Three forgers at three addresses agree with each other, but forged tokens fit no rounding scale, so nothing
    excuses them.
    """
    forgers = {f"coarse {place}": engine(70 + place, 0.0, 400, forged=1.0) for place in range(3)}
    bench, decided = check_each(world, {**{f"fine {place}": HONEST for place in range(4)}, **forgers})
    assert decided == [(node_id, Decision.QUARANTINED) for node_id in forgers]
    assert bench.coordinator.status().trust.coarser == ()
