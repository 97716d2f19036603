"""Every rollout that a step computes, held against the learner's own forward pass, before it has a gradient.

The learner's policy π is a few steps newer than μ, which drew the rollout, and computes in another precision, so
neither what μ claimed nor where u fell can be right to the digit. What no honest engine gives is left out of the step,
with its whole group; what is merely odd goes on as counts, for whoever judges nodes. Two questions, each asked of a
rollout's tokens in order, each as a bet against the engine's honesty that wins nothing on average if it is honest. By
Ville's inequality its stake then grows by a factor of 1 / α, at any token, with a probability of α at most.

    claims      the ratio r = π(o_t) / claim, less `SLACK` nats, which rounding may add to each. If the claim is what
                the token was drawn with, the mean of r is 1, whatever the two policies are, however old one is:

                    stake x (1 + r) / 2

                It is claims below the truth that make a token count more than it should. Those above it take its
                weight away from it, and are evidence alone.

    draws       the distance v of u from the token's interval under π. An honest engine's are outside with a probability
                of at most 0.1, and by more than v with one of 0.1 exp(-v / `FAR`), of all tokens before:

                    stake x 0.9 if v = 0, else x 0.95 exp(v / (2 FAR))        mean 0.9 · 0.9 + 0.1 · 2 · 0.95 = 1

                Measured, built-in model, engines of 4 bits, rollouts four steps old, at four times the default learning
                rate, the worst that was tried: outside 9 %, by more than .1, .2, .4, .6: 4.0, 2.2, .64, .14 %; the
                bound has 10 % and 5.1, 2.6, .69, .18 %. At the default rate: 4 % and .53, .11, .01, 0 %.

`FALSE_EXCLUSION` is α of each. Of 65,000 honest rollouts of float32, bfloat16, 8 and 4 bits, none to four steps old,
the largest stakes were e^3.2 and e^5.6 (at the default rate e^1.2 and e^1.8), of the e^16.1 that it takes.

All is computed from numbers in the host's memory, in one order: the same batch is screened the same again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.trust.evidence import CLAIM_EDGES, PROBABILITY_EDGES, log_odds

SLACK: Final = 0.05
FAR: Final = 0.15
FALSE_EXCLUSION: Final = 1e-7
MAX_LOG_RATIO: Final = 80.0
"""Keeps an exponential finite; far beyond what a stake needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The drawn tokens of whole rollouts, one rollout after the other [N]."""

    claims_N: NDArray[np.float32]
    learner_logprobs_N: NDArray[np.float32]
    distances_N: NDArray[np.float32]
    """NaN where it is not known what the token was drawn with."""
    lengths: Sequence[int]
    """Tokens of each rollout."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """What a step's screen has found; groups and rollouts are named by their places in the step."""

    left_out: set[int] = field(default_factory=set)
    """Groups that the step was computed without."""
    suspects: set[int] = field(default_factory=set)
    """Rollouts on whose account groups were left out or an update was held back."""
    counts: dict[tuple[int, int], tuple[list[int], list[int], float]] = field(default_factory=dict)
    """By rollout and turn: tokens by PROBABILITY_EDGES and by CLAIM_EDGES, and the sum of the mismatch."""

    def frame(self, turns: Sequence[int]) -> dict[str, Any]:
        """For the hub and a checkpoint: rollouts as places among all turns of the step, each rollout having as many as
        `turns` says; lists alone."""
        first = np.cumsum([0, *turns]).tolist()
        places = sorted(self.counts)
        return {
            "left_out": sorted(self.left_out),
            "suspects": [first[number] + turn for number in sorted(self.suspects) for turn in range(turns[number])],
            "screened": [first[number] + turn for number, turn in places],
            "draws": [self.counts[place][0] for place in places],
            "claims": [self.counts[place][1] for place in places],
            "mismatch_kl": [self.counts[place][2] for place in places],
        }

    def packed_counts(self) -> list[Any]:
        """`counts` as lists alone."""
        return [[*place, *counts] for place, counts in self.counts.items()]

    def add_counts(self, packed: Sequence[Mapping[str, Any]]) -> None:
        """What other ranks have counted: {"counts": `packed_counts`} of each."""
        for rollout, turn, *counts in (row for frame in packed for row in frame["counts"]):
            draws, claims, mismatch = counts
            self.counts[rollout, turn] = draws, claims, mismatch


def impossible(tokens: Tokens) -> NDArray[np.bool_]:
    """Which rollouts [R] no honest engine gives."""
    ratios = np.minimum(_differences(tokens), MAX_LOG_RATIO)
    claims = np.logaddexp(0, ratios - SLACK) - log(2)
    distances = tokens.distances_N.astype(np.float64)
    known = np.isfinite(distances)
    outside = log(0.95) + np.where(known, distances, 0) / (2 * FAR)
    draws = np.where(known, np.where(distances > 0, outside, log(0.9)), 0)
    enough = -log(FALSE_EXCLUSION)
    return (_largest_stakes(claims, tokens.lengths) >= enough) | (_largest_stakes(draws, tokens.lengths) >= enough)


def count(tokens: Tokens, turns_N: NDArray[np.int64]) -> dict[tuple[int, int], tuple[list[int], list[int], float]]:
    """By rollout [R] and turn, as `Findings.counts`; nothing of what is not known to have been drawn with some u."""
    rollouts_N = np.repeat(np.arange(len(tokens.lengths)), tokens.lengths)
    known = np.isfinite(tokens.distances_N)
    differences = _differences(tokens)[known]
    odds = np.nan_to_num(log_odds(tokens.learner_logprobs_N) - log_odds(tokens.claims_N), nan=0.0)[known]
    places, of_place = np.unique(np.stack([rollouts_N[known], turns_N[known]], axis=1), axis=0, return_inverse=True)
    draws = _by_class(tokens.distances_N[known].astype(np.float64), PROBABILITY_EDGES, of_place, len(places))
    claims = _by_class(np.abs(odds), CLAIM_EDGES, of_place, len(places))
    near = np.minimum(differences, MAX_LOG_RATIO)
    mismatch = np.bincount(of_place, weights=np.expm1(near) - near, minlength=len(places))
    return {
        (rollout, turn): (draws[number].tolist(), claims[number].tolist(), float(mismatch[number]))
        for number, (rollout, turn) in enumerate(places.tolist())
    }


def _differences(tokens: Tokens) -> NDArray[np.float64]:
    """Nats from the claim to the learner's own; none of a learner that computes nonsense."""
    return np.nan_to_num(tokens.learner_logprobs_N.astype(np.float64) - tokens.claims_N, nan=0.0)


def _largest_stakes(log_factors_N: NDArray[np.float64], lengths: Sequence[int]) -> NDArray[np.float64]:
    """The largest logarithm that each rollout's stake has after any of its tokens."""
    ends = np.cumsum(lengths)
    return np.array(
        [
            np.cumsum(log_factors_N[end - length : end]).max(initial=0.0)
            for end, length in zip(ends, lengths, strict=True)
        ]
    )


def _by_class(
    values: NDArray[np.float64], edges: Sequence[float], of_place: NDArray[np.int64], num_places: int
) -> NDArray[np.int64]:
    classes = len(edges) + 1
    found = np.searchsorted(edges, values, side="left")
    return np.bincount(of_place * classes + found, minlength=num_places * classes).reshape(num_places, classes)
