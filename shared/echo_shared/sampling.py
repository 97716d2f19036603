"""What every sampling engine takes and gives: one group to draw, one finished rollout. Ids in, ids out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echo_shared.messages import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """The rollouts `indices` of one group: one prompt, drawn by `policy_version` as `echo_shared.draws` defines."""

    lease_id: int
    group_id: int
    indices: tuple[int, ...]
    prompt_ids: NDArray[np.int32]
    seed: int
    policy_version: int
    temperature: float
    max_tokens: int
    """Of the completion, the stop token included."""
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRollout:
    """One completion. A drawn stop token is its last token; `behavior_logprobs` in nats, one a token."""

    lease_id: int
    group_id: int
    index: int
    policy_version: int
    completion_ids: NDArray[np.int32]
    behavior_logprobs: NDArray[np.float32]
    finish_reason: FinishReason
    sampling_s: float
    """From the start of its prompt's prefill to its last token."""
