"""Committed rollouts in the form that the verifier needs, and evidence as frames for its process. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.trust.evidence import Evidence
from echo_shared.process.child import Frame
from echo_shared.records.rollout import RolloutPayload

NodeEvidence = tuple[str, Evidence]
"""The node that drew a part (span) of a rollout, and the evidence about that part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRollout(RolloutPayload):
    """A completion with all inputs needed to recompute its draws. Its `spans` (which node and version drew which
    tokens) cover all tokens."""

    rollout_id: str
    prompt_ids: NDArray[np.int32]
    """Token ids before the completion; for a later turn, the whole conversation before it."""
    seed: int
    """Seed with which this turn of the rollout was drawn."""
    index: int
    is_greedy: bool = False
    """True for a greedy completion: each token is the most likely one. Seed and claimed log-probabilities are then not
    used."""
    temperature: float | None = None
    """Sampling temperature; None = the run's temperature."""


def pack_evidence(evidence: Evidence) -> Frame:
    return {name: getattr(evidence, name) for name in Evidence.__slots__}


def unpack_evidence(frame: Frame) -> Evidence:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in frame.items()}
    return Evidence(**values)


def unpack_spans(frames: list[Frame]) -> tuple[NodeEvidence, ...]:
    """Return, from an answer of the verifier process, each part's node and the evidence about the part."""
    return tuple(
        (frame["node_id"], unpack_evidence({name: frame[name] for name in Evidence.__slots__})) for frame in frames
    )
