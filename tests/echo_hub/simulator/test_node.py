"""One node's engine, by hand: two slots, 0.5 s a token, a prompt takes 1 s."""

from __future__ import annotations

import pytest

from echo_hub.simulator.node import HeldLease, Sampling, SimulatedNode
from echo_hub.simulator.population import Traits

TRAITS = Traits(width=2, capacity=4, s_per_token=0.5, prefill_s=1.0, fetch_s=0.0, phase=0.0, price_per_hour=0.0)


@pytest.fixture
def node() -> SimulatedNode:
    return SimulatedNode("node", 0, TRAITS)


def lease(node: SimulatedNode, lease_id: int, *tokens: int, version: int = 0) -> HeldLease:
    held = HeldLease(node=node, lease_id=lease_id, group_id=lease_id, policy_version=version)
    held.unfinished = {index: Sampling(held, index, count) for index, count in enumerate(tokens)}
    return held


def told(begun: list[Sampling]) -> list[tuple[int, int, float]]:
    return [(sampling.lease.lease_id, sampling.index, sampling.ends_at) for sampling in begun]


def test_slots_are_filled_in_the_order_of_arrival_and_a_lease_shares_its_prompt(node: SimulatedNode) -> None:
    first = node.take(lease(node, 1, 4, 2, 6), 10.0)
    assert told(first) == [(1, 0, 13.0), (1, 1, 12.0)]
    assert node.take(lease(node, 2, 2), 11.0) == []
    # The prompt of the first lease is there; that of the second is not.
    third = node.finish(first[1], 12.0)
    assert told(third) == [(1, 2, 15.0)]
    assert told(node.finish(first[0], 13.0)) == [(2, 0, 15.0)]


def test_a_slot_is_free_again_once_its_rollout_is_not_wanted(node: SimulatedNode) -> None:
    begun = node.take(lease(node, 1, 4, 4, 4), 0.0)
    node.take(lease(node, 2, 2), 0.0)
    assert told(node.stop(1, 1.0)) == [(2, 0, 3.0)]
    assert all(sampling.stopped for sampling in begun) and node.free == 1
    assert node.stop(1, 1.0) == [] == node.stop(99, 1.0)


def test_what_is_finished_is_not_stopped(node: SimulatedNode) -> None:
    begun = node.take(lease(node, 1, 2, 4), 0.0)
    node.finish(begun[0], 2.0)
    node.stop(1, 2.5)
    assert [sampling.stopped for sampling in begun] == [False, True] and node.free == 2


def test_a_lease_waits_for_its_version(node: SimulatedNode) -> None:
    assert node.take(lease(node, 1, 2, version=2), 0.0) == []
    assert node.version_came(1, 1.0) == []
    assert told(node.take(lease(node, 2, 2, version=1), 1.0)) == [(2, 0, 3.0)]
    assert told(node.version_came(2, 2.0)) == [(1, 0, 4.0)]


def test_a_lease_that_is_stopped_while_it_waits_never_begins(node: SimulatedNode) -> None:
    node.take(lease(node, 1, 2, version=1), 0.0)
    node.stop(1, 0.5)
    assert node.version_came(1, 1.0) == [] and node.free == 2


def test_what_is_lost_is_lost_in_slots_queue_and_waiting(node: SimulatedNode) -> None:
    begun = node.take(lease(node, 1, 2, 2, 2), 0.0)
    node.take(lease(node, 2, 2, version=1), 0.0)
    assert [held.lease_id for held in node.stop_all(1.0)] == [1, 2]
    assert all(sampling.stopped for sampling in begun)
    assert (node.free, node.version_came(1, 1.0), node.held) == (2, [], {})
