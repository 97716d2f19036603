"""Evidence that adds up: sums that survive a restart, and rewards that depend on how near each draw was to another
token.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from echo_hub.core.accounting.effects import (
    ScoreRecorded,
    SendLease,
    TrustDecided,
)
from echo_hub.core.accounting.events import (
    RolloutScored,
)
from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.judging import NOTHING, Alternative
from echo_hub.core.trust.likelihood import NUM_SCALES
from echo_hub.core.trust.standing import Decision, StandingState
from tests.echo_hub.core.trust.checked_run import (
    CHECKS_ALL,
    F32,
    HONEST,
    arrive,
    join,
    name,
    proven,
    score,
    standing_of,
    verdict,
)


def watched_sums(nats: float) -> tuple[float, ...]:
    """Return a sum of evidence for each kind of forgery: `nats` for "one token in fifty is forged", 0 for all
    others.
    """
    return (0.0, nats, *NOTHING[2:])


def test_after_a_restart_a_nodes_sums_still_count(world) -> None:
    """Watched nodes stay watched after a restart: every rollout is checked, and scores are held until the check."""
    bench = world(proven("a", sums=watched_sums(3.0)), groups_per_step=32)
    leases = join(bench, "a")
    assert all(arrive(bench, lease) == [name(lease)] for lease in leases[:10])
    score(bench, leases[0])
    assert not bench.of(ScoreRecorded)
    bench = world(proven("a", sums=watched_sums(0.5)), groups_per_step=32)
    leases = join(bench, "a")
    assert len([lease for lease in leases if arrive(bench, lease)]) < len(leases) / 3


# --- rewards


def near_edges(count: float, variance: float = 0.25) -> Evidence:
    """Return honest evidence in which `count` more tokens than expected were drawn by a random number u near an edge of
    the token's interval.
    """
    return replace(HONEST, near_edges=np.repeat([count, variance], NUM_SCALES).tobytes())


def shopped_sums(nats: float) -> tuple[float, ...]:
    return (*NOTHING[: Alternative.SHOPPED], nats, nats, nats)


def earn(bench, leases: list[SendLease], node_id: str, shown: Evidence = HONEST) -> None:
    """Let the node return a failed rollout in which no draw was near another token, and a solved rollout with the
    evidence `shown`.
    """
    failure, success = [lease for lease in leases if lease.node_id == node_id][:2]
    for lease, found, reward in ((failure, near_edges(0.0, 0.0), 0.0), (success, shown, 1.0)):
        arrive(bench, lease)
        bench.tell(RolloutScored(rollout_id=name(lease), reward=reward))
        verdict(bench, lease, found)


def test_a_node_whose_rewards_follow_edges_is_convicted(world) -> None:
    bench = world(proven("a", sums=shopped_sums(16.0)), groups_per_step=4)
    earn(bench, join(bench, "a"), "a", near_edges(2.0))
    (decided,) = bench.of(TrustDecided)
    assert (decided.decision, decided.node_id) == (Decision.QUARANTINED, "a")
    assert decided.reason.startswith("Where rounding allows either of two tokens, it returns the one that earns more")
    row = standing_of(bench, "a")
    assert row.state is StandingState.QUARANTINED and row.num_failed == 1
    assert bench.coordinator.status().trust.failed_checks == {str(F32): 1}


@pytest.mark.parametrize("shown", [HONEST, near_edges(-2.0)])
def test_a_node_that_earns_without_edges_is_not_convicted(world, shown: Evidence) -> None:
    bench = world(proven("a", sums=shopped_sums(16.0)), groups_per_step=4)
    earn(bench, join(bench, "a"), "a", shown)
    assert bench.of(TrustDecided) == [] and standing_of(bench, "a").state is not StandingState.QUARANTINED


def test_a_reward_before_the_check_counts_too(world) -> None:
    """Rewards of a proven node do not wait for checks, so the hub must match reward and check in either order."""
    bench = world(proven("a"), trust=CHECKS_ALL, groups_per_step=4)
    earn(bench, leases := join(bench, "a"), "a", near_edges(2.0))
    last = leases[2]
    arrive(bench, last)
    verdict(bench, last, HONEST)
    assert max(standing_of(bench, "a").sums[Alternative.SHOPPED :]) > 0.5


def test_half_the_evidence_for_a_shopping_conviction_makes_suspect(world) -> None:
    bench = world(proven("a", sums=shopped_sums(8.0)), trust=CHECKS_ALL, groups_per_step=4)
    earn(bench, join(bench, "a"), "a", near_edges(2.0))
    assert standing_of(bench, "a").state is StandingState.SUSPECT


@pytest.mark.parametrize(("nats", "is_watched"), [(3.5, False), (4.5, True)])
def test_rewards_have_a_node_watched_later_than_tokens(world, nats: float, is_watched: bool) -> None:
    bench = world(proven("a", sums=shopped_sums(nats)), groups_per_step=32)
    leases = join(bench, "a")
    assert (sum(bool(arrive(bench, lease)) for lease in leases) == len(leases)) is is_watched


def test_a_class_whose_rewards_follow_edges_is_spared(world) -> None:
    """If all nodes of a class earn more for draws near the edge to another token, probably the class's rounding makes a
    better policy, so no node is convicted of shopping (choosing tokens by reward).
    """
    nodes = ("a", "b", "c")
    bench = world(*(proven(node_id, sums=shopped_sums(16.0)) for node_id in nodes), groups_per_step=16)
    for node_id in nodes:
        earn(bench, join(bench, node_id), node_id, near_edges(2.0))
    decided = [(record.node_id, record.decision) for record in bench.of(TrustDecided)]
    assert {node_id for node_id, decision in decided if decision is Decision.RELEASED} == {"a", "b"}
    assert bench.coordinator.status().trust.quarantined == 0
