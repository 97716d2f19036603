"""A handwritten client for tests, which records what the hub sends (leases, receipts, standby), and functions that make
handwritten rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.harness import stranger
from echo_shared.wire.messages import (
    FinishReason,
    Lease,
    ReceiptState,
    Rollout,
    RolloutPart,
    RolloutParts,
    Standby,
    rollout_id,
)


class Stranger(stranger.Stranger):
    standby: Standby | None = None

    def _hear(self, message: object) -> None:
        if isinstance(message, Standby):
            self.standby = message
        super()._hear(message)

    async def lease(self) -> Lease:
        """Return a lease that the client holds; wait if there is none. Raises TimeoutError."""
        await self.until(lambda: self.leases)
        return next(iter(self.leases.values()))

    async def outcome(self, sent: Rollout) -> ReceiptState:
        """Wait until the sent rollout is scored or in a final state, or until the connection ends. Return the rollout's
        last known state.
        """
        before = (None, ReceiptState.LEASED, ReceiptState.RECEIVED)
        await self.until(lambda: self.states.get(sent.rollout_id) not in before or self.ended)
        return self.states.get(sent.rollout_id, ReceiptState.LEASED)


def body(index: int, count: int = 3) -> list[int]:
    return [20 + (index + place) % 10 for place in range(count)]


def completion(lease: Lease, index: int, ids: list[int] | None = None, **changes: Any) -> Rollout:
    """Return a rollout with the tokens `ids` (default: `body(index)`) and the stop token. It is not validated."""
    tokens = np.array([*(ids or body(index)), lease.stop_ids[0]], np.int32)
    return Rollout.model_construct(
        **{
            "type": "rollout",
            "rollout_id": rollout_id(lease.lease_id, index),
            "lease_id": lease.lease_id,
            "group_id": lease.group_id,
            "index": index,
            "policy_version_start": lease.policy_version,
            "policy_version_end": lease.policy_version,
            "completion_ids": tokens,
            "behavior_logprobs": np.full(len(changes.get("completion_ids", tokens)), -1.0, np.float32),
            "finish_reason": FinishReason.STOP,
            "sampling_s": 0.01,
            **changes,
        }
    )


def part(
    lease: Lease, index: int, start: int, ids: Sequence[int], *, logprob: float = -1.0, version: int | None = None
) -> RolloutPart:
    """Return the part of a completion that starts at token `start`. It is not validated."""
    return RolloutPart.model_construct(
        lease_id=lease.lease_id,
        index=index,
        start=start,
        policy_version=lease.policy_version if version is None else version,
        ids=np.array(ids, np.int32),
        logprobs=np.full(len(ids), logprob, np.float32),
    )


def parts(*of: RolloutPart) -> RolloutParts:
    return RolloutParts.model_construct(type="rollout_parts", parts=of)
