"""Committed rollouts as the verifier needs them, and their frames for its process. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.payload import Span
from echo_hub.core.trust.evidence import Evidence
from echo_shared.child import Frame

NodeEvidence = tuple[str, Evidence]
"""The node that drew a span, and the evidence about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRollout:
    """One completion, with all inputs of its draws."""

    rollout_id: str
    prompt_ids: NDArray[np.int32]
    """[P] token ids before the completion; of a later turn, the whole conversation before it."""
    completion_ids: NDArray[np.int32]
    """[T]"""
    behavior_logprobs: NDArray[np.float32]
    """[T] log-probabilities in nats, as the nodes claim them."""
    spans: tuple[Span, ...]
    """The nodes that drew its tokens, with version and number of tokens, in order. They cover all tokens."""
    seed: int
    """Seed of its group's turn."""
    index: int
    is_greedy: bool = False
    """True for a greedy completion, where each token is the most likely one; seed and claims are unused."""


def pack(drawn: DrawnRollout) -> Frame:
    return {
        "rollout_id": drawn.rollout_id,
        "prompt_ids": drawn.prompt_ids,
        "completion_ids": drawn.completion_ids,
        "behavior_logprobs": drawn.behavior_logprobs,
        "spans": [[span.node_id, span.policy_version, span.num_tokens] for span in drawn.spans],
        "seed": drawn.seed,
        "index": drawn.index,
        "is_greedy": drawn.is_greedy,
    }


def unpack(frame: Frame) -> DrawnRollout:
    spans = tuple(
        Span(node_id=node_id, policy_version=version, num_tokens=count) for node_id, version, count in frame["spans"]
    )
    return DrawnRollout(**{**frame, "spans": spans})


def pack_evidence(evidence: Evidence) -> Frame:
    return {name: getattr(evidence, name) for name in Evidence.__slots__}


def unpack_evidence(frame: Frame) -> Evidence:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in frame.items()}
    return Evidence(**values)


def unpack_spans(frames: list[Frame]) -> tuple[NodeEvidence, ...]:
    """Return node and evidence of each span in an answer of the verifier process."""
    return tuple(
        (frame["node_id"], unpack_evidence({name: frame[name] for name in Evidence.__slots__})) for frame in frames
    )
