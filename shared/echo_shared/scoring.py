"""What an engine is asked to compute again of another node's completion, and what it finds, token by token.

The node is told neither what was claimed of the completion nor its seed: it says where each token's interval lies in
the cumulative distribution, and the hub sees whether the draw fell into it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Intervals = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Where each token's interval begins, and its log-probability in nats; both [T]."""

LEAST_LOGPROB: Final = -1e4
"""Said of a token without probability: a message holds finite numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """One completion, and by which versions it is to be computed again."""

    rollout_id: str
    prompt_ids: NDArray[np.int32]
    completion_ids: NDArray[np.int32]
    versions: tuple[tuple[int, int], ...]
    """Version and number of tokens, in order, one after the other; of all of the completion."""
    temperature: float

    def spans(self) -> Iterator[tuple[int, NDArray[np.int32], int]]:
        """Each version, all that is to be fed to it and to be found of it, and the place of its first token there."""
        ids = np.concatenate([self.prompt_ids, self.completion_ids])
        first = len(self.prompt_ids)
        for version, count in self.versions:
            yield version, ids[: first + count], first
            first += count


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What the engine found of a completion; both arrays empty: it cannot tell."""

    rollout_id: str
    below: NDArray[np.float32]
    logprobs: NDArray[np.float32]

    @classmethod
    def of(cls, rollout_id: str, found: list[Intervals]) -> Scored:
        """Of the spans, in order. What is no number is as good as nothing."""
        below = np.concatenate([one for one, _ in found] or [np.zeros(0)])
        logprobs = np.concatenate([one for _, one in found] or [np.zeros(0)])
        if np.isnan(below).any() or np.isnan(logprobs).any():
            below = logprobs = np.zeros(0)
        return cls(
            rollout_id=rollout_id,
            below=below.clip(0.0, 1.0).astype(np.float32),
            logprobs=logprobs.clip(LEAST_LOGPROB, 0.0).astype(np.float32),
        )
