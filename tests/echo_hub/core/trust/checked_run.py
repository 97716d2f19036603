"""Helpers of tests of trust: settings of a run whose rollouts are checked, evidence, and functions that make the
coordinator's events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from echo_hub.core.accounting.effects import (
    CheckRollout,
    SendLease,
    StandingRecorded,
)
from echo_hub.core.accounting.events import (
    NodeConnected,
    NodeReported,
    RolloutChecked,
    RolloutScored,
)
from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.numerics import NumericsClass
from echo_hub.core.trust.settings import TrustSettings
from echo_hub.core.trust.standing import StandingRow, StandingState
from tests.echo_hub.core.trust.simulated import evidence

SETTINGS = TrustSettings(enabled=True, secret=b"secret", first_checked=2)
CHECKS_ALL = replace(SETTINGS, least_checked=1.0)
F32 = NumericsClass("torch", "f32", "cpu")
HONEST = evidence(40)
FORGED = evidence(forged=4)
DOUBTFUL = evidence(forged=1)
"""Evidence of one forged token. A proven node becomes watched after showing it once, and suspect after twice."""


def proven(node_id: str, **values: Any) -> StandingRow:
    state = StandingState.PROVEN
    return replace(
        StandingRow(node_id=node_id, state=state, numerics=F32, num_verified=100, proof=-20.0, num_checked=100),
        **values,
    )


def join(bench, node_id: str, numerics: NumericsClass = F32, *, capacity: int = 100) -> list[SendLease]:
    bench.tell(
        NodeConnected(node_id=node_id, numerics=numerics),
        NodeReported(node_id=node_id, capacity=capacity, policy_version=0),
    )
    return bench.of(SendLease)


def arrive(bench, lease: SendLease) -> list[str]:
    """Deliver all rollouts of a lease, and return the ids of those that the verifier must check."""
    bench.tell(*(bench.arrival(lease, index) for index in lease.indices))
    return [effect.rollout_id for effect in bench.of(CheckRollout)]


def name(lease: SendLease, index: int = 0) -> str:
    return f"{lease.lease_id}-{index}"


def score(bench, lease: SendLease) -> None:
    bench.tell(*(RolloutScored(rollout_id=name(lease, index), reward=1.0) for index in lease.indices))


def verdict(bench, lease: SendLease, evidence: Evidence, node_id: str = "", index: int = 0) -> None:
    spans = ((node_id or lease.node_id, evidence),)
    bench.tell(RolloutChecked(rollout_id=name(lease, index), spans=spans))


def standing_of(bench, node_id: str) -> StandingRow:
    return [record.row for record in bench.of(StandingRecorded) if record.row.node_id == node_id][-1]
