"""What re-computing one node's tokens shows of its honesty: how often it missed the draw, and by how much the truth.

Two questions are asked of each token that a node drew, under the policy version that it names:

    draw    how far does u[t] lie outside the claimed token's interval of the cumulative distribution, in nats of
            log-odds? An honest node with the very same numerics is never outside; rounding puts it just outside now and
            then
    claim   by how much are its claimed log-odds off, ln(p / (1 - p))? Rounding moves logits, and so the log-odds of
            likely tokens as much as those of unlikely ones, to both sides alike. Another temperature multiplies them;
            whoever claims all his tokens more likely than they were errs to one side

Probabilities hide both. Log-probabilities do the second: of a token of 99 %, whatever is claimed is off by a hundredth
at most, unless it is outright invented. And where a token of 97 % is not what was drawn, u lies in the rest, a few
hundredths away at most, as far as rounding moves the edge of one of 50 %; in log-odds it lies a nat away on average
wherever the edge is, and rounding of four bits moves hardly any edge by half a nat.

The answers are counted in classes, so that evidence of several rollouts adds up and every kind of numerics can learn
its own honest shares (`DESIGN.md` section 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

DRAW_EDGES: Final = (0.001, 0.05, 0.2, 0.5, 1.0)
"""A token counts in the first class whose edge is not below its distance, nats of log-odds; the last class has no
edge."""
PROBABILITY_EDGES: Final = (1e-4, 0.005, 0.02, 0.05, 0.2)
"""Likewise, cumulative probability: of draws that are held against another policy than drew them, or of what two nodes
found of the same ones. Of a token that lies far outside, the log-odds differ by all that rounding moves an edge."""
CLAIM_EDGES: Final = (0.01, 0.05, 0.2, 0.5, 1.0)
"""Likewise."""
CLAIM_CUT: Final = 0.5
"""Of each token's signed difference no more than so many nats count, of either sign, so that few large ones do not hide
many small ones, nor make them up."""
SURE: Final = 1e-3
"""All probabilities within so much of 1 have the same log-odds: what is left to 1 is rounding there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Counts of tokens that one node drew for one rollout, or for several, by class."""

    draws: tuple[int, ...]
    """len(DRAW_EDGES) + 1 counts; in comparisons, by PROBABILITY_EDGES."""
    claims: tuple[int, ...]
    """len(CLAIM_EDGES) + 1 counts."""
    mismatch_kl: float = 0.0
    """Sum over the tokens of the k3 estimate of KL(behaviour ‖ truth), nats."""
    bias: float = 0.0
    """Sum over the tokens of the true less the claimed log-odds, each cut at `CLAIM_CUT`, nats."""
    squares: float = 0.0
    """Sum of the squares of these, nats**2."""

    @property
    def num_tokens(self) -> int:
        return sum(self.draws)

    @property
    def num_claims(self) -> int:
        """Of a greedy choice none counts."""
        return sum(self.claims)

    @property
    def without_claims(self) -> Evidence:
        """What the draws alone show."""
        return Evidence(draws=self.draws, claims=NO_EVIDENCE.claims)

    @classmethod
    def of(
        cls,
        distances: ArrayLike,
        differences: ArrayLike,
        mismatch_kl: float = 0.0,
        *,
        edges: tuple[float, ...] = DRAW_EDGES,
    ) -> Evidence:
        """Of one span: see `of_spans`."""
        distances_N, differences_N = np.asarray(distances, np.float64), np.asarray(differences, np.float64)
        none_N = np.zeros_like(distances_N)
        (found,) = cls.of_spans(distances_N, differences_N, none_N, [len(distances_N)], edges=edges)
        return replace(found, mismatch_kl=mismatch_kl)

    @classmethod
    def of_spans(
        cls,
        distances_N: NDArray[np.float64],
        differences_N: NDArray[np.float64],
        divergence_N: NDArray[np.float64],
        num_tokens: Sequence[int],
        *,
        edges: tuple[float, ...] = DRAW_EDGES,
    ) -> list[Evidence]:
        """Of spans one behind the other, of so many tokens each: how far each draw lies outside, by how many nats its
        true log-odds are above what is claimed, and the estimate of the divergence; no NaN."""
        count = len(num_tokens)
        spans_N = np.repeat(np.arange(count), num_tokens)
        cut_N = differences_N.clip(-CLAIM_CUT, CLAIM_CUT)
        fields = zip(
            _counted(distances_N, edges, spans_N, count),
            _counted(np.abs(differences_N), CLAIM_EDGES, spans_N, count),
            *(np.bincount(spans_N, summed, count).tolist() for summed in (divergence_N, cut_N, cut_N * cut_N)),
            strict=True,
        )
        return [
            cls(draws=tuple(draws), claims=tuple(claims), mismatch_kl=kl, bias=bias, squares=squares)
            for draws, claims, kl, bias, squares in fields
        ]

    def __add__(self, other: Evidence) -> Evidence:
        return Evidence(
            draws=tuple(a + b for a, b in zip(self.draws, other.draws, strict=True)),
            claims=tuple(a + b for a, b in zip(self.claims, other.claims, strict=True)),
            mismatch_kl=self.mismatch_kl + other.mismatch_kl,
            bias=self.bias + other.bias,
            squares=self.squares + other.squares,
        )

    def __sub__(self, other: Evidence) -> Evidence:
        """What is left without `other`, which is part of it."""
        return Evidence(
            draws=tuple(a - b for a, b in zip(self.draws, other.draws, strict=True)),
            claims=tuple(a - b for a, b in zip(self.claims, other.claims, strict=True)),
            mismatch_kl=self.mismatch_kl - other.mismatch_kl,
            bias=self.bias - other.bias,
            squares=self.squares - other.squares,
        )


def log_odds(logprobs_N: NDArray[np.floating]) -> NDArray[np.float64]:
    """ln(p / (1 - p)), nats: see `SURE`."""
    capped_N = np.minimum(logprobs_N.astype(np.float64), np.log1p(-SURE))
    return capped_N - np.log(-np.expm1(capped_N))


def _counted(
    values_N: NDArray[np.float64], edges: tuple[float, ...], spans_N: NDArray[np.intp], num_spans: int
) -> list[list[int]]:
    """Of each span, how many values are in each class."""
    classes = len(edges) + 1
    places_N = spans_N * classes + np.searchsorted(edges, values_N)
    counts: list[list[int]] = np.bincount(places_N, minlength=num_spans * classes).reshape(-1, classes).tolist()
    return counts


NO_EVIDENCE: Final = Evidence.of([], [])
"""Of no tokens."""
