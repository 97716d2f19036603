"""The cheap checks of a rollout's payload: what no honest backend can send. The lease itself is checked by the core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from echo_hub.core.payload import RolloutPayload
from echo_shared.errors import RemoteProtocolError
from echo_shared.messages import FinishReason

LOGPROB_SLACK: Final = 1e-3
"""Nats above zero that rounding in a backend may leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBounds:
    """What every completion of this run must keep."""

    vocabulary_size: int
    max_tokens: int
    stop_ids: frozenset[int]


def check_payload(payload: RolloutPayload, bounds: SamplingBounds) -> None:
    """Raises RemoteProtocolError, with the reason, unless the completion could have been drawn as leased."""
    ids, logprobs = payload.completion_ids, payload.behavior_logprobs
    if not 1 <= len(ids) <= bounds.max_tokens:
        raise RemoteProtocolError("A completion has a wrong length.", got=f"{len(ids)} tokens of {bounds.max_tokens}")
    if len(logprobs) != len(ids):
        raise RemoteProtocolError(
            "A completion needs one logprob a token.", got=f"{len(logprobs)} for {len(ids)} tokens"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= bounds.vocabulary_size:
        raise RemoteProtocolError("A token is not in the vocabulary.", got=f"ids {int(ids.min())} to {int(ids.max())}")
    if float(logprobs.max()) > LOGPROB_SLACK:
        raise RemoteProtocolError("A log-probability is above zero.", got=f"{float(logprobs.max()):.4f}")
    stops = np.isin(ids, list(bounds.stop_ids))
    if stops[:-1].any():
        raise RemoteProtocolError("A completion goes on after its stop token.", got=f"{int(stops.sum())} stop tokens")
    if payload.finish_reason is FinishReason.STOP and not stops[-1]:
        raise RemoteProtocolError("A completion claims to have stopped, without a stop token.", got=str(int(ids[-1])))
    if payload.finish_reason is FinishReason.LENGTH and (stops[-1] or len(ids) != bounds.max_tokens):
        raise RemoteProtocolError("A completion claims to be cut at its length.", got=f"{len(ids)} tokens")
