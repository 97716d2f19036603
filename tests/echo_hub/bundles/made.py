"""Groups and leases of bundles, written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from echo_hub.bundles.blocks import BundledGroup, BundledRollout
from echo_shared.records.rollout import DrawnSpan, RolloutPayload
from echo_shared.wire.messages import Checked, FinishReason, ReceiptState


def payload_of(*ids: int, node: str = "node-a", version: int = 0, observed: tuple[int, ...] = ()) -> RolloutPayload:
    return RolloutPayload(
        completion_ids=np.array(ids, np.int32),
        behavior_logprobs=np.linspace(-1, -0.5, len(ids)).astype(np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=0.0,
        observation_ids=np.array(observed, np.int32),
        spans=(DrawnSpan(node_id=node, policy_version=version, num_tokens=len(ids)),),
    )


def lease(lease_id: int, **fields: Any) -> BundledRollout:
    payload = fields.setdefault("payload", payload_of(5, 6, 1))
    known: dict[str, Any] = {
        "index": 0,
        "turn": 0,
        "node": "node-a",
        "policy_version": 0,
        "state": ReceiptState.TRAINED,
        "drop_reason": None,
        "checked": Checked.NO,
        "reward": 1.0,
        "turn_reward": None,
        "num_tokens": None if payload is None else len(payload.completion_ids),
        "place": 0,
    }
    return BundledRollout(lease_id=lease_id, **{**known, **fields})


def group(group_id: int, *rollouts: BundledRollout, step: int | None = 1, seed: int = 9) -> BundledGroup:
    return BundledGroup(
        group_id=group_id, seed=seed, step=step, prompt_ids=np.array([7, 8, 9], np.int32), rollouts=rollouts
    )
