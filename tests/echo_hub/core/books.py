"""A small ledger, with the nodes and the outbox (queued effects) that it needs."""

from __future__ import annotations

import numpy as np

from echo_hub.core.accounting.effects import (
    Effect,
    RolloutsLeased,
)
from echo_hub.core.accounting.events import GroupPrepared
from echo_hub.core.accounting.ledger import Ledger
from echo_hub.core.accounting.outbox import Outbox
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot
from echo_hub.core.nodes.ready import Nodes
from echo_hub.core.settings import CoordinatorSettings
from echo_hub.core.training import Training
from echo_shared.records.rollout import RolloutPayload
from echo_shared.wire.messages import FinishReason

PAYLOAD = RolloutPayload(
    completion_ids=np.array([1], np.int32),
    behavior_logprobs=np.array([-1.0], np.float32),
    finish_reason=FinishReason.LENGTH,
    sampling_s=0.0,
)


class Books:
    def __init__(self, *, discount: float | None = None) -> None:
        settings = CoordinatorSettings(mode="async", steps=1, groups_per_step=1, group_size=2, deadline_s=1.0)
        self.nodes, self.out = Nodes(settings.nodes), Outbox()
        self.ledger = Ledger(nodes=self.nodes, out=self.out, discount=discount)
        self.training = Training(settings, CoordinatorSnapshot(), ledger=self.ledger, out=self.out)
        self.lease_id = 0

    def lease(self, group_id: int, *indices: int, node_id: str = "a", version: int = 0, turn: int = 0) -> None:
        self.lease_id += 1
        self.ledger.lease(
            RolloutsLeased(
                lease_id=self.lease_id,
                node_id=node_id,
                group_id=group_id,
                indices=indices,
                turn=turn,
                policy_version=version,
                deadline=9.0,
            ),
            4.0,
        )

    def open(self, group_id: int) -> None:
        self.training.open_group(GroupPrepared(group_id=group_id, seed=7))

    @property
    def wanting(self) -> list[int]:
        return list(self.training.wanting.first(99))

    def receive(self, *ids: str, score: bool = True) -> None:
        for rollout_id in ids:
            self.ledger.receive(self.ledger.rollouts[rollout_id], PAYLOAD, 5.0)
            if score:
                self.ledger.score(self.ledger.rollouts[rollout_id], 0.5)

    def complete(self, group_id: int, version: int = 0) -> None:
        self.open(group_id)
        self.lease(group_id, 0, 1, version=version)
        self.receive(f"{self.lease_id}-0", f"{self.lease_id}-1")

    def kinds(self) -> list[type[Effect]]:
        return [type(effect) for effect in self.out.take()]
