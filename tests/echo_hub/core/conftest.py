"""`Bench`, a coordinator for tests: a test sends it events and reads its effects by type. Groups are prepared
automatically.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest

from echo_hub.core.accounting.effects import Effect, PrepareGroup, RolloutReceipt, ScoreRollout, SendLease, SendReceipts
from echo_hub.core.accounting.events import (
    Event,
    GroupPrepared,
    LearnerReady,
    NodeConnected,
    NodeReported,
    RolloutArrived,
    RolloutContinued,
    RolloutScored,
    StepDone,
    VersionPublished,
)
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot
from echo_hub.core.coordinator import Coordinator
from echo_hub.core.settings import CoordinatorSettings
from echo_shared.records.rollout import RolloutPayload
from echo_shared.wire.messages import FinishReason, rollout_id

_T = TypeVar("_T")

PAYLOAD = RolloutPayload(
    completion_ids=np.array([5, 7], np.int32),
    behavior_logprobs=np.array([-0.5, -1.25], np.float32),
    finish_reason=FinishReason.STOP,
    sampling_s=0.1,
)


class Bench:
    """A coordinator for tests. `effects` holds the effects of the last call, including those of automatically prepared
    groups.
    """

    def __init__(self, snapshot: CoordinatorSnapshot | None = None, *, prepare: bool = True, **settings: Any) -> None:
        base = {
            "mode": "async",
            "steps": 4,
            "groups_per_step": 2,
            "group_size": 2,
            "deadline_s": 60.0,
            "first_window": 4096,
        }
        self.settings = CoordinatorSettings(**{**base, **settings})
        self.coordinator = Coordinator(self.settings, snapshot or CoordinatorSnapshot())
        self.now = 1_000.0
        self.prepare = prepare
        self.leases: dict[int, SendLease] = {}
        self.effects: list[Effect] = []
        self.prepared: list[PrepareGroup] = []
        self._take(self.coordinator.start(self.now))

    def _take(self, effects: list[Effect]) -> None:
        self.effects = list(effects)
        for effect in self.effects:
            if isinstance(effect, SendLease):
                self.leases[effect.lease_id] = effect
            elif isinstance(effect, PrepareGroup) and self.prepare:
                self.prepared.append(effect)
                more = self.coordinator.handle(
                    GroupPrepared(group_id=effect.group_id, seed=100 + effect.group_id), self.now
                )
                self.effects += more  # The loop continues over the appended effects.

    def tell(self, *events: Event) -> list[Effect]:
        effects: list[Effect] = []
        for event in events:
            self._take(self.coordinator.handle(event, self.now))
            effects += self.effects
        self.effects = effects
        return effects

    def of(self, kind: type[_T]) -> list[_T]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def receipts(self, node_id: str) -> list[RolloutReceipt]:
        return [r for sent in self.of(SendReceipts) if sent.node_id == node_id for r in sent.receipts]

    def node(self, node_id: str, capacity: int = 100, version: int | None = 0) -> list[Effect]:
        return self.tell(
            NodeConnected(node_id=node_id),
            NodeReported(node_id=node_id, capacity=capacity, policy_version=version),
        )

    def arrival(self, lease: SendLease, index: int, /, **changes: Any) -> RolloutArrived:
        values: dict[str, Any] = {
            "node_id": lease.node_id,
            "rollout_id": rollout_id(lease.lease_id, index),
            "lease_id": lease.lease_id,
            "group_id": lease.group_id,
            "index": index,
            "policy_version_start": lease.policy_version,
            "policy_version_end": lease.policy_version,
            "payload": PAYLOAD,
        }
        return RolloutArrived(**{**values, **changes})

    def rewarded(self, group_id: int, *rewards: float) -> list[Effect]:
        effects: list[Effect] = []
        for lease in [lease for lease in self.leases.values() if lease.group_id == group_id]:
            effects += self.tell(*(self.arrival(lease, index) for index in lease.indices))
            ids = [(rollout_id(lease.lease_id, index), rewards[index]) for index in lease.indices]
            effects += self.tell(*(RolloutScored(rollout_id=each, reward=reward) for each, reward in ids))
        self.effects = effects
        return effects

    def deliver(self, lease: SendLease, *, score: bool = True, reward: float = 1.0) -> list[Effect]:
        effects = self.tell(*(self.arrival(lease, index) for index in lease.indices))
        if score:
            effects = effects + self.tell(
                *(RolloutScored(rollout_id=effect.rollout_id, reward=reward) for effect in self.of(ScoreRollout))
            )
        self.effects = effects
        return effects

    def go_on(self, lease: SendLease) -> list[Effect]:
        """Deliver all rollouts of a lease; the environment answers these turns with one token instead of a score, so
        the episode continues.
        """
        effects = self.tell(*(self.arrival(lease, index) for index in lease.indices))
        ids = [effect.rollout_id for effect in self.of(ScoreRollout)]
        self.effects = effects + self.tell(
            *(RolloutContinued(rollout_id=each, observation_ids=np.array([9], np.int32)) for each in ids)
        )
        return self.effects

    def deliver_group(self, group_id: int) -> list[Effect]:
        effects: list[Effect] = []
        for lease in [lease for lease in self.leases.values() if lease.group_id == group_id]:
            effects += self.deliver(lease)
        self.effects = effects
        return effects

    def train(self, step: int, *, publish: bool = True) -> list[Effect]:
        effects = self.tell(StepDone(step=step, metrics={"loss": 0.5}))
        if publish:
            effects = effects + self.tell(VersionPublished(policy_version=step))
        self.effects = effects
        return effects

    def learner(self, version: int = 0) -> list[Effect]:
        return self.tell(LearnerReady(policy_version=version))


@pytest.fixture
def bench() -> Callable[..., Bench]:
    return Bench
