"""What re-computing one node's tokens shows of its honesty: how often it missed the draw, and by how much the truth.

Two questions are asked of each token that a node drew, under the policy version that it names:

    draw    how far does u[t] lie outside the claimed token's interval of the cumulative distribution? An honest node
            with the very same numerics is never outside; rounding puts it just outside now and then
    claim   by how many nats is its claimed log-probability off? Rounding errs to both sides alike; another temperature,
            or whoever claims all his tokens more likely than they were, to one

The answers are counted in classes, so that evidence of several rollouts adds up and every kind of numerics can learn
its own honest shares (`DESIGN.md` section 6).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import fsum
from typing import Final

DRAW_EDGES: Final = (1e-4, 0.005, 0.02, 0.05, 0.2)
"""A token counts in the first class whose edge is not below its distance, in cumulative probability; the last class has
no edge."""
CLAIM_EDGES: Final = (1e-3, 0.01, 0.05, 0.2, 1.0)
"""Likewise, nats."""
CLAIM_CUT: Final = 0.1
"""Of each token's signed difference no more than so many nats count, of either sign, so that few large ones do not hide
many small ones, nor make them up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Counts of tokens that one node drew for one rollout, or for several, by class."""

    draws: tuple[int, ...]
    """len(DRAW_EDGES) + 1 counts."""
    claims: tuple[int, ...]
    """len(CLAIM_EDGES) + 1 counts."""
    mismatch_kl: float = 0.0
    """Sum over the tokens of the k3 estimate of KL(behaviour ‖ truth), nats."""
    bias: float = 0.0
    """Sum over the tokens of the true less the claimed log-probability, each cut at `CLAIM_CUT`, nats."""
    squares: float = 0.0
    """Sum of the squares of these, nats**2."""

    @property
    def num_tokens(self) -> int:
        return sum(self.draws)

    @classmethod
    def of(cls, distances: list[float], differences: list[float], mismatch_kl: float = 0.0) -> Evidence:
        """Of tokens whose draws lie so far outside, and whose true log-probabilities are so many nats above what is
        claimed."""
        cut = [max(-CLAIM_CUT, min(CLAIM_CUT, difference)) for difference in differences]
        return cls(
            draws=_counted(distances, DRAW_EDGES),
            claims=_counted([abs(difference) for difference in differences], CLAIM_EDGES),
            mismatch_kl=mismatch_kl,
            bias=fsum(cut),
            squares=fsum(one * one for one in cut),
        )

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


def _counted(values: list[float], edges: tuple[float, ...]) -> tuple[int, ...]:
    counts = [0] * (len(edges) + 1)
    for value in values:
        counts[bisect_left(edges, value)] += 1
    return tuple(counts)


NO_EVIDENCE: Final = Evidence.of([], [])
"""Of no tokens."""
