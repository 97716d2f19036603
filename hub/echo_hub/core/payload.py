"""Content of a rollout. The coordinator passes it to the store and reads only token counts, spans and times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echo_shared.messages import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive tokens of one completion, sampled by one node with one version."""

    node_id: str
    policy_version: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPayload:
    """One completion: token ids and behaviour logprobs (nats), both [T]."""

    completion_ids: NDArray[np.int32]
    behavior_logprobs: NDArray[np.float32]
    finish_reason: FinishReason
    sampling_s: float
    spans: tuple[Span, ...] = ()
    """Spans of the completion, in order. Empty: the leased node sampled all tokens with the lease's version."""
