"""What a rollout carries besides its names: opaque to the coordinator, kept by the store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echo_shared.messages import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPayload:
    """One completion: ids and behaviour logprobs (nats), both [T]."""

    completion_ids: NDArray[np.int32]
    behavior_logprobs: NDArray[np.float32]
    finish_reason: FinishReason
    sampling_s: float
