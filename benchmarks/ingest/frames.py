"""Cheap frames of rollouts, as a node would send them, with tokens that no model has drawn."""

from __future__ import annotations

from typing import Any, Final

import msgpack
import numpy as np

from echo_shared.messages.fields import pack_array

OVERHEAD_BYTES: Final = 330
"""Approximate bytes of a frame without its tokens."""
VARIANTS: Final = 64
"""Number of completions, which are sent in turn."""
DIGITS: Final = (20, 30)
"""Range of tokens of the built-in model without stop tokens."""


class Completions:
    """Completions of one size. `stop_id` ends each."""

    def __init__(self, frame_bytes: int, stop_id: int, *, seed: int) -> None:
        rng = np.random.default_rng(seed)
        count = (frame_bytes - OVERHEAD_BYTES) // 8
        self._variants = []
        for _ in range(VARIANTS):
            ids = rng.integers(*DIGITS, count, np.int32)
            ids[-1] = stop_id
            logprobs = -rng.exponential(0.5, count).astype(np.float32)
            self._variants.append((pack_array(ids), pack_array(logprobs)))
        self._next = 0

    def frame(self, lease: dict[str, Any], index: int) -> tuple[str, bytes]:
        """Make a rollout of a lease. Returns its id and its frame."""
        ids, logprobs = self._variants[self._next % VARIANTS]
        self._next += 1
        rollout_id = f"{lease['lease_id']}-{index}"
        fields = {
            "type": "rollout",
            "rollout_id": rollout_id,
            "lease_id": lease["lease_id"],
            "group_id": lease["group_id"],
            "index": index,
            "policy_version_start": lease["policy_version"],
            "policy_version_end": lease["policy_version"],
            "completion_ids": ids,
            "behavior_logprobs": logprobs,
            "finish_reason": "stop",
            "sampling_s": 0.5,
            "num_given": 0,
            "versions": (),
        }
        return rollout_id, msgpack.packb(fields)
