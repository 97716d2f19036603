"""Records of a run with handmade durations: two quick nodes and a slow one serve a learner that waits for them.

Step k is planned at 1003 + 4 (k - 1) s, trains for 2 s and has 0.1 s of hand-off. Its eight rollouts are leased 3 s
before its plan: three to each quick node, returned after 1.5 s, and two to the slow node, returned after 3 s. A version
is published 0.1 s after its training, and reaches the nodes 0.4 s later.
"""

from __future__ import annotations

import numpy as np

from echo_hub.core.accounting.effects import (
    GroupOpened,
    Record,
    RolloutReceived,
    RolloutsLeased,
    ScoreRecorded,
    StepPlanned,
    StepTrained,
    VersionRecorded,
)
from echo_hub.spread.holdings import Arrival
from echo_hub.store.store import Store
from echo_shared.records.rollout import RolloutPayload
from echo_shared.wire.messages import Fetched, FinishReason

BEGAN = 1_000.0
PERIOD_S = 4.0
TRAIN_S = 2.0
HAND_OFF_S = 0.1
LEASES = (("fast0", (0, 1, 2), 1.5), ("fast1", (3, 4, 5), 1.5), ("slow0", (6, 7), 3.0))
"""(node, indices of the group that the node samples, seconds that this takes)."""
KINDS = {"fast0": ("torch", "RTX 4070"), "fast1": ("torch", "RTX 4070"), "slow0": ("llama_cpp", "Old laptop")}


def write_books(store: Store, *, steps: int = 6, slow_start: float = 0.0) -> None:
    """Write the records. Leases of the first step take `slow_start` seconds longer."""
    for node_id, (backend, device) in KINDS.items():
        store.node_seen(node_id=node_id, public_key=bytes(32), name=node_id, backend=backend, device=device, now=BEGAN)
    for step in range(1, steps + 1):
        _write_step(store, step, BEGAN + PERIOD_S * (step - 1), early_s=slow_start if step == 1 else 0.0)


def _write_step(store: Store, step: int, begun_at: float, *, early_s: float) -> None:
    """Write a step's records; its leases begin `early_s` seconds earlier than usual."""
    group_id = step - 1
    leases: list[Record] = []
    received: list[Record] = []
    scored: list[Record] = []
    for number, (node_id, indices, seconds) in enumerate(LEASES):
        lease_id = 10 * step + number
        leases.append(
            RolloutsLeased(
                lease_id=lease_id,
                node_id=node_id,
                group_id=group_id,
                indices=indices,
                turn=0,
                policy_version=step - 1,
                deadline=begun_at + 60,
            )
        )
        for index in indices:
            rollout = f"{lease_id}-{index}"
            received.append(
                RolloutReceived(rollout_id=rollout, received_at=begun_at + seconds, payload=_payload(seconds))
            )
            scored.append(ScoreRecorded(rollout_id=rollout, reward=float(index % 2)))
    ids = tuple(record.rollout_id for record in scored if isinstance(record, ScoreRecorded))
    planned_at = begun_at + 3.0
    trained_at = planned_at + TRAIN_S + HAND_OFF_S
    store.apply([GroupOpened(group_id=group_id, seed=group_id), *leases], begun_at - early_s)
    store.apply([*received, *scored], begun_at + 3.0)
    planned = StepPlanned(step=step, group_ids=(group_id,), rollout_ids=ids, staleness=(0,), planned_at=planned_at)
    trained = StepTrained(step=step, rollout_ids=ids, metrics={"train_s": TRAIN_S}, trained_at=trained_at)
    store.apply([planned, trained, VersionRecorded(policy_version=step, published_at=trained_at + 0.1)], trained_at)
    store.record_distribution([_arrival(node_id, step) for node_id in KINDS], trained_at + 0.5)


def _payload(seconds: float) -> RolloutPayload:
    return RolloutPayload(
        completion_ids=np.array([5, 7, 1], np.int32),
        behavior_logprobs=np.array([-0.5, -1.0, -0.25], np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=seconds,
    )


def _arrival(node_id: str, version: int) -> Arrival:
    fetched = Fetched(
        info_hash=version.to_bytes(20), policy_version=version, seconds=0.4, swarm_bytes=7, web_seed_bytes=0
    )
    return Arrival(node_id=node_id, fetched=fetched, broadcast_s=0.4)
