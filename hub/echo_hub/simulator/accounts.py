"""Count rollouts from the coordinator's records, as a store would."""

from __future__ import annotations

from collections import Counter

from echo_hub.core.accounting.effects import (
    RolloutReceived,
    RolloutsAnswered,
    RolloutsDropped,
    RolloutsLeased,
    StepPlanned,
    StepTrained,
)
from echo_hub.simulator.node import SimulatedNode
from echo_shared.wire.messages import DropReason


class Accounts:
    """Counts of rollouts, unless stated otherwise.

    Leases to liars (nodes that claim capacity and never return anything) are counted from `liars_from_s` on, staleness
    after the warm-up steps.
    """

    def __init__(self, *, group_size: int, warm_up_steps: int, liars_from_s: float) -> None:
        self._group_size = group_size
        self._warm_up_steps = warm_up_steps
        self._liars_from_s = liars_from_s
        self._owner_of_lease: dict[int, int] = {}
        self._version_of_lease: dict[int, int] = {}
        self._versions: dict[str, tuple[int, int, int]] = {}
        """For each received rollout that is in no batch yet: (tokens, sum of the tokens' versions, number of
        versions)."""
        self.leased = 0
        self.trained = 0
        self.answered = 0
        self.dropped: Counter[DropReason] = Counter()
        self.lease_sizes: Counter[int] = Counter()
        self.leased_late = 0
        """Number of rollouts leased at or after the virtual time `liars_from_s`."""
        self.leased_to_liars = 0
        """Number of `leased_late` rollouts that were leased to liars (nodes that return nothing)."""
        self.planned = 0
        """Number of rollouts in the batches of steps after the warm-up."""
        self.planned_staleness = 0
        """Sum of the staleness of the `planned` rollouts, each as stale as its group."""
        self.tokens = 0
        """Number of tokens in the `planned` rollouts."""
        self.token_staleness = 0
        """Sum of the staleness of all `tokens`; a token's staleness follows from the version that sampled it."""
        self.mixed = 0
        """Number of `planned` rollouts that were sampled with more than one version."""
        self.batch: dict[int, int] = {}
        """Number of rollouts per step, for planned steps not trained yet."""
        self.leased_of: Counter[int] = Counter()
        """Number of leased rollouts, by node number."""
        self.trained_of: Counter[int] = Counter()
        """Number of trained rollouts, by number of the node with the lease."""

    def lease(self, record: RolloutsLeased, node: SimulatedNode, now: float) -> None:
        count = len(record.indices)
        self._owner_of_lease[record.lease_id] = node.number
        self._version_of_lease[record.lease_id] = record.policy_version
        self.leased += count
        self.lease_sizes[count] += 1
        self.leased_of[node.number] += count
        if now >= self._liars_from_s:
            self.leased_late += count
            self.leased_to_liars += count * (node.traits.width == 0)

    def receive(self, record: RolloutReceived) -> None:
        spans, count = record.payload.spans, len(record.payload.completion_ids)
        if spans:
            versions = sum(span.num_tokens * span.policy_version for span in spans)
            self._versions[record.rollout_id] = (count, versions, len({span.policy_version for span in spans}))
        else:
            version = self._version_of_lease[int(record.rollout_id.partition("-")[0])]
            self._versions[record.rollout_id] = (count, count * version, 1)

    def drop(self, record: RolloutsDropped) -> None:
        self.dropped[record.reason] += len(record.rollout_ids)
        for rollout_id in record.rollout_ids:
            self._versions.pop(rollout_id, None)

    def answer(self, record: RolloutsAnswered) -> None:
        self.answered += len(record.rollout_ids)
        for rollout_id in record.rollout_ids:
            self._versions.pop(rollout_id, None)

    def plan(self, record: StepPlanned) -> None:
        self.batch[record.step] = len(record.rollout_ids)
        drawn = [self._versions.pop(rollout_id) for rollout_id in record.rollout_ids]
        if record.step > self._warm_up_steps:
            self.planned += self._group_size * len(record.group_ids)
            self.planned_staleness += self._group_size * sum(record.staleness)
            self.tokens += sum(count for count, _, _ in drawn)
            self.token_staleness += sum((record.step - 1) * count - versions for count, versions, _ in drawn)
            self.mixed += sum(num_versions > 1 for _, _, num_versions in drawn)

    def train(self, record: StepTrained) -> None:
        del self.batch[record.step]
        self.trained += len(record.rollout_ids)
        owners, trained_of = self._owner_of_lease, self.trained_of
        for rollout_id in record.rollout_ids:
            trained_of[owners[int(rollout_id.partition("-")[0])]] += 1
