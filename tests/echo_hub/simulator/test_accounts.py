"""A simulation's counts, taken from the coordinator's records, equal counts by hand."""

from __future__ import annotations

import numpy as np
import pytest

from echo_hub.core.accounting.effects import RolloutReceived, RolloutsDropped, RolloutsLeased, StepPlanned, StepTrained
from echo_hub.simulator.accounts import Accounts
from echo_hub.simulator.node import SimulatedNode
from echo_hub.simulator.population import Traits
from echo_shared.records.rollout import DrawnSpan, RolloutPayload
from echo_shared.wire.messages import DropReason, FinishReason


def node(number: int, width: int) -> SimulatedNode:
    traits = Traits(width=width, capacity=8, s_per_token=1.0, prefill_s=0.0, fetch_s=0.0, phase=0.0, price_per_hour=0.0)
    return SimulatedNode(f"node-{number}", number, traits)


def lease(lease_id: int, *indices: int) -> RolloutsLeased:
    return RolloutsLeased(
        lease_id=lease_id, node_id="node", group_id=0, indices=indices, policy_version=0, deadline=9.0
    )


def received(rollout_id: str, *versions: int) -> RolloutReceived:
    """Return a received rollout with one token of each version."""
    ids = np.zeros(len(versions), np.int32)
    payload = RolloutPayload(
        completion_ids=ids,
        behavior_logprobs=ids.view(np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=1.0,
        spans=tuple(DrawnSpan(node_id="node", policy_version=version, num_tokens=1) for version in versions)
        if any(versions)
        else (),
    )
    return RolloutReceived(rollout_id=rollout_id, received_at=0.0, payload=payload)


def plan(step: int, *staleness: int) -> StepPlanned:
    return StepPlanned(
        step=step,
        group_ids=tuple(range(len(staleness))),
        rollout_ids=("1-0", "1-1"),
        staleness=staleness,
        planned_at=0.0,
    )


def test_every_count() -> None:
    accounts = Accounts(group_size=2, warm_up_steps=1, liars_from_s=60.0)
    honest, liar = node(0, 2), node(1, 0)
    accounts.lease(lease(1, 0, 1), honest, 59.0)
    accounts.lease(lease(2, 0), honest, 60.0)
    accounts.lease(lease(3, 1, 2, 3), liar, 61.0)
    assert (accounts.leased, accounts.lease_sizes) == (6, {2: 1, 1: 1, 3: 1})
    assert (accounts.leased_late, accounts.leased_to_liars, accounts.leased_of) == (4, 3, {0: 3, 1: 3})
    accounts.drop(RolloutsDropped(rollout_ids=("3-1", "3-2"), reason=DropReason.STALE))
    accounts.drop(RolloutsDropped(rollout_ids=("3-3",), reason=DropReason.EXPIRED))
    assert accounts.dropped == {DropReason.STALE: 2, DropReason.EXPIRED: 1}
    accounts.receive(received("1-0", 0))
    accounts.receive(received("1-1", 0))
    accounts.plan(plan(1, 0))
    assert accounts.batch == {1: 2}
    accounts.train(StepTrained(step=1, rollout_ids=("1-0", "1-1"), metrics={}, trained_at=0.0))
    assert (accounts.trained, accounts.trained_of, accounts.batch) == (2, {0: 2}, {})


def test_staleness_is_counted_after_the_warm_up_by_group_and_by_token() -> None:
    accounts = Accounts(group_size=2, warm_up_steps=1, liars_from_s=60.0)
    accounts.lease(lease(1, 0, 1), node(0, 2), 0.0)
    for step, staleness in ((1, (0,)), (2, (1,)), (4, (3,))):
        accounts.receive(received("1-0", 0, 0, 0))
        accounts.receive(received("1-1", *(max(0, version) for version in (step - 3, step - 2, step - 2, step - 1))))
        accounts.plan(plan(step, *staleness))
    assert (accounts.planned, accounts.planned_staleness) == (4, 8)
    # Step 2 has six tokens that are one step old, three of each rollout. Step 4 has three tokens of age 3, and four of
    # ages 2, 1, 1, 0.
    assert (accounts.tokens, accounts.token_staleness, accounts.mixed) == (14, 6 + 13, 2)


def test_dropped_rollouts_are_forgotten() -> None:
    accounts = Accounts(group_size=2, warm_up_steps=0, liars_from_s=60.0)
    accounts.lease(lease(1, 0, 1), node(0, 2), 0.0)
    accounts.receive(received("1-0", 0))
    accounts.drop(RolloutsDropped(rollout_ids=("1-0", "1-1"), reason=DropReason.STALE))
    with pytest.raises(KeyError):
        accounts.plan(plan(1, 0))
