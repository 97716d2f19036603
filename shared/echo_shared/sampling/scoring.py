"""Request to recompute another node's completion, and the result for each token.

The request omits the claimed log-probabilities and the seed, so that the checking node cannot copy the claims. It
reports each token's interval: the range of cumulative probability within which the random number draws this token. The
hub checks that the random number, which follows from the seed, lies in the interval.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Intervals = tuple[NDArray[np.float64], NDArray[np.float64]]
"""(lower end of the interval of cumulative probability that draws each token, log-probability of the token in nats),
both [T].
"""

LEAST_LOGPROB: Final = -1e4
"""Log-probability that is reported for a token of probability 0, because messages hold only finite numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """One completion to recompute, with the policy versions that drew it."""

    rollout_id: str
    prompt_ids: NDArray[np.int32]
    completion_ids: NDArray[np.int32]
    versions: tuple[tuple[int, int], ...]
    """(version, number of tokens) in token order, for the whole completion."""
    temperature: float

    def spans(self) -> Iterator[tuple[int, NDArray[np.int32], int]]:
        """Yield (version, ids to feed, index of the version's first token in ids) for each version."""
        ids = np.concatenate([self.prompt_ids, self.completion_ids])
        first = len(self.prompt_ids)
        for version, count in self.versions:
            yield version, ids[: first + count], first
            first += count


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Result of recomputing a completion: for each token, the interval of cumulative probability that draws the token.
    An interval starts at `below`; the logarithm of its width is in `logprobs` (nats). Both arrays are [T], or empty if
    the engine cannot compute them.
    """

    rollout_id: str
    below: NDArray[np.float32]
    logprobs: NDArray[np.float32]

    @classmethod
    def of(cls, rollout_id: str, found: list[Intervals]) -> Scored:
        """Join the results for consecutive parts of a completion, each computed with the version that drew the part. A
        NaN makes the result empty.
        """
        below = np.concatenate([one for one, _ in found] or [np.zeros(0)])
        logprobs = np.concatenate([one for _, one in found] or [np.zeros(0)])
        if np.isnan(below).any() or np.isnan(logprobs).any():
            below = logprobs = np.zeros(0)
        return cls(
            rollout_id=rollout_id,
            below=below.clip(0.0, 1.0).astype(np.float32),
            logprobs=logprobs.clip(LEAST_LOGPROB, 0.0).astype(np.float32),
        )
