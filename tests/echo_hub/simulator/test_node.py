"""The engine of one simulated node, computed by hand: it samples two completions at once, and takes 0.5 s per token and
1 s per prompt.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo_hub.simulator.node import HeldLease, Moves, Sampling, SimulatedNode
from echo_hub.simulator.population import Traits
from echo_shared.records.rollout import DrawnSpan
from echo_shared.wire.messages import MAX_VERSION_SPANS

TRAITS = Traits(width=2, capacity=4, s_per_token=0.5, prefill_s=1.0, fetch_s=0.0, phase=0.0, price_per_hour=0.0)


@pytest.fixture
def node() -> SimulatedNode:
    return SimulatedNode("node", 0, TRAITS)


@pytest.fixture
def moving() -> SimulatedNode:
    """Return a node that moves unfinished rollouts to new versions; a move takes 0.25 s, plus the time to read the
    tokens again (0.125 s each).
    """
    traits = replace(TRAITS, prefill_token_s=0.125)
    return SimulatedNode("node", 0, traits, Moves(max_tokens=100, prompt_tokens=8, swap_s=0.25))


def spans(sampling: Sampling) -> list[tuple[int, int]]:
    return [(span.policy_version, span.num_tokens) for span in sampling.spans(sampling.tokens)]


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
    # The node's cache holds only the first lease's prompt.
    third = node.finish(first[1], 12.0)
    assert told(third) == [(1, 2, 15.0)]
    assert told(node.finish(first[0], 13.0)) == [(2, 0, 15.0)]


def test_a_nodes_timing_equals_a_real_machines() -> None:
    node = SimulatedNode("node", 0, replace(TRAITS, width=4, paces=(0.5, 2.0, 1.0)))
    begun = node.take(lease(node, 1, 2, 2, 2, 2), 0.0)
    assert told(begun) == [(1, 0, 2.0), (1, 1, 5.0), (1, 2, 3.0), (1, 3, 2.0)], "the prompt, and then two tokens"


def test_a_revoked_rollout_frees_its_slot(node: SimulatedNode) -> None:
    begun = node.take(lease(node, 1, 4, 4, 4), 0.0)
    node.take(lease(node, 2, 2), 0.0)
    assert told(node.stop(1, 1.0)) == [(2, 0, 3.0)]
    assert all(sampling.stopped for sampling in begun) and node.free == 1
    assert node.stop(1, 1.0) == [] == node.stop(99, 1.0)


def test_a_finished_rollout_cannot_be_stopped(node: SimulatedNode) -> None:
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


def test_a_lost_lease_is_removed_from_slots_queue_and_waiting(node: SimulatedNode) -> None:
    begun = node.take(lease(node, 1, 2, 2, 2), 0.0)
    node.take(lease(node, 2, 2, version=1), 0.0)
    assert [held.lease_id for held in node.stop_all(1.0)] == [1, 2]
    assert all(sampling.stopped for sampling in begun)
    assert (node.free, node.version_came(1, 1.0), node.held) == (2, [], {})


def test_a_newer_version_continues_after_the_sampled_tokens(moving: SimulatedNode) -> None:
    begun = moving.take(lease(moving, 1, 12, 6, 3), 0.0)
    assert told(begun) == [(1, 0, 7.0), (1, 1, 4.0)]
    # At 3 s each rollout has four tokens. The move takes 0.25 s, 1 s for the prompt and 4 * 0.125 s; then 8 and 2
    # tokens are left.
    assert told(moving.version_came(1, 3.0)) == [(1, 0, 8.75), (1, 1, 5.75)]
    assert [begun[0].drawn(now) for now in (3.0, 4.75, 5.3, 8.75)] == [4, 4, 5, 12]
    (third,) = moving.finish(begun[1], 5.75)
    assert (third.ends_at, spans(begun[0]), spans(begun[1]), spans(third)) == (
        7.25, [(0, 4), (1, 8)], [(0, 4), (1, 2)], [(1, 3)]
    )  # fmt: skip


def test_without_moves_a_newer_version_changes_nothing(node: SimulatedNode) -> None:
    (one,) = node.take(lease(node, 1, 12), 0.0)
    assert (node.version_came(1, 3.0), one.ends_at, spans(one)) == ([], 7.0, [(0, 12)])


def test_a_rollout_close_to_its_limit_is_not_interrupted(moving: SimulatedNode) -> None:
    assert moving.moves is not None
    moving.moves.max_tokens = 12
    moving.take(lease(moving, 1, 12), 0.0)
    assert moving.version_came(1, 5.0) == []
    assert len(moving.take(lease(moving, 2, 12), 5.0)) == 1
    # The next version moves this rollout after all, together with the second one, which is far from its limit.
    assert told(moving.version_came(2, 5.5)) == [(1, 0, 9.375), (2, 0, 12.75)]


def test_rereading_takes_its_share_of_the_time(moving: SimulatedNode) -> None:
    """The move at 3 s reads 8 + 4 tokens again. Reading costs 1/16 of sampling at 4 tokens a second: 0.1875 s. It may
    take a fifth of the time, so the next move is due 0.9375 s later.
    """
    moving.take(lease(moving, 1, 40), 0.0)
    assert len(moving.version_came(1, 3.0)) == 1
    assert (moving.version_came(2, 3.5), moving.moves_at) == ([], 3.9375)
    (one,) = moving.move_on(3.9375)
    assert (moving.moves_at, spans(one)) == (float("inf"), [(0, 4), (2, 36)])


def test_a_lease_begins_by_the_newest_that_is_there(moving: SimulatedNode, node: SimulatedNode) -> None:
    for one, version in ((moving, 3), (node, 1)):
        one.version_came(3, 0.0)
        (began,) = one.take(lease(one, 1, 4, version=1), 1.0)
        assert spans(began) == [(version, 4)]


def test_a_rollout_with_the_most_versions_is_not_interrupted(moving: SimulatedNode) -> None:
    held = lease(moving, 1, 100)
    before = tuple(DrawnSpan(node_id="other", policy_version=v, num_tokens=1) for v in range(MAX_VERSION_SPANS))
    held.unfinished = {0: Sampling(held, 0, 100, before)}
    moving.version_came(MAX_VERSION_SPANS, 0.0)
    moving.take(held, 0.0)
    assert moving.version_came(MAX_VERSION_SPANS + 1, 1.0) == []
