"""What a rollout carries besides its names: opaque to the coordinator, kept by the store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echo_shared.messages import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens of one completion that one node drew by one version, one after the other."""

    node_id: str
    policy_version: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPayload:
    """One completion: ids and behaviour logprobs (nats), both [T]."""

    completion_ids: NDArray[np.int32]
    behavior_logprobs: NDArray[np.float32]
    finish_reason: FinishReason
    sampling_s: float
    spans: tuple[Span, ...] = ()
    """Who drew how much of it by which version, in order. Empty: the node that it was leased to drew it all, by its
    lease's version."""
