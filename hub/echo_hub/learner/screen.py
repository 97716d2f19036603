"""Screening of all rollouts in a step against the learner's own forward pass, before they contribute to the gradient.

The learner's policy π is a few steps newer than μ, the policy that drew the rollout, and computes in another precision.
So neither the logprobs that the node reported (claims) nor μ's intervals (the range of cumulative probability within
which the random number u draws a token) can match exactly. A rollout that no honest engine produces is left out of the
step, with its whole group. Merely unusual rollouts stay; they are counted as evidence for judging nodes. Two tests run
over each rollout's tokens, in order. Each test is a bet against the engine's honesty: a stake begins at 1, and each
token o_t multiplies it by a factor. For an honest engine the factor's mean is at most 1. By Ville's inequality, the
probability that the stake of an honest rollout ever reaches 1 / α is at most α.

    claims      the ratio r = π(o_t) / claim, reduced by `SLACK` nats for rounding of both. If the claim is the true
                probability of the draw, r has mean 1, for any two policies, however old:
                    stake x (1 + r) / 2
                Claims below the truth are dangerous: they give a token too much weight. Claims above it only
                reduce the token's weight; they count as evidence alone.

    draws       the distance v of u from the token's interval under π. For an honest engine, v > 0 has probability
                0.1 at most, and v > x has probability 0.1 exp(-x / `FAR`), given all earlier tokens:
                    stake x 0.9 if v = 0, else x 0.95 exp(v / (2 FAR))        mean 0.9 · 0.9 + 0.1 · 2 · 0.95 = 1
                Measured, built-in model, 4-bit engines, rollouts four steps old, four times the default learning
                rate (the worst case tried): v > 0: 9 %, v > .1, .2, .4, .6: 4.0, 2.2, .64, .14 %; the bound
                allows 10 % and 5.1, 2.6, .69, .18 %. At the default rate: 4 % and .53, .11, .01, 0 %.

`FALSE_EXCLUSION` is α of each test. Among 65,000 honest rollouts of float32, bfloat16, 8-bit and 4-bit engines, up to
four steps old, the largest stakes were e^3.2 and e^5.6 (at the default rate e^1.2 and e^1.8). Exclusion needs e^16.1.

Everything is computed in host memory in a fixed order, so screening a batch again gives the same result.
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
"""Limit of a log-ratio, so that its exponential stays finite. Far smaller ratios already leave a rollout out of the
step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenedTokens:
    """The drawn tokens of whole rollouts, in arrays [N], one rollout after the other."""

    claims_N: NDArray[np.float32]
    learner_logprobs_N: NDArray[np.float32]
    distances_N: NDArray[np.float32]
    """Distance of each token's uniform number u from the interval of cumulative probability that draws the token; NaN
    where u is unknown."""
    lengths: Sequence[int]
    """Number of tokens of each rollout."""


@dataclass(slots=True, kw_only=True)
class ScreenFindings:
    """Results of the test of a step's rollouts for forgery. Groups and rollouts are named by their index in the
    step.
    """

    left_out: set[int] = field(default_factory=set)
    """Groups left out of the step, because no honest engine produces one of their rollouts."""
    suspects: set[int] = field(default_factory=set)
    """Rollouts that caused their group to be left out, or that dominated an update that was held back."""
    counts: dict[tuple[int, int], tuple[list[int], list[int], float]] = field(default_factory=dict)
    """For each (rollout, turn): token counts in the bins of PROBABILITY_EDGES and of CLAIM_EDGES, and the summed
    mismatch KL."""
    screened: list[tuple[ScreenedTokens, NDArray[np.int64], Sequence[int]]] = field(default_factory=list)
    """Tokens not yet counted in `counts`, the turn of each token, and each rollout's number."""

    def count_screened(self) -> None:
        """Count the tokens in `screened`, add the counts to `counts`, and empty `screened`."""
        for tokens, turns_N, numbers in self.screened:
            for (rollout, turn), counts in count(tokens, turns_N).items():
                self.counts[numbers[rollout], turn] = counts
        self.screened.clear()

    def frame(self, turns: Sequence[int]) -> dict[str, Any]:
        """Return the results for the hub and a checkpoint, as lists.

        A turn is named by its index among all turns of the step's rollouts; `turns` lists each rollout's number of
        turns.
        """
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
        """Return `counts` as lists, to send them to another rank."""
        return [[*place, *counts] for place, counts in self.counts.items()]

    def add_counts(self, packed: Sequence[Mapping[str, Any]]) -> None:
        """Add the counts of other ranks. `packed` has {"counts": result of `packed_counts`} for each rank."""
        for rollout, turn, *counts in (row for frame in packed for row in frame["counts"]):
            draws, claims, mismatch = counts
            self.counts[rollout, turn] = draws, claims, mismatch


def impossible(tokens: ScreenedTokens) -> NDArray[np.bool_]:
    """Return, for each rollout [R], True if no honest engine produces it."""
    ratios = np.minimum(_differences(tokens), MAX_LOG_RATIO)
    claims = np.logaddexp(0, ratios - SLACK) - log(2)
    distances = tokens.distances_N.astype(np.float64)
    known = np.isfinite(distances)
    outside = log(0.95) + np.where(known, distances, 0) / (2 * FAR)
    draws = np.where(known, np.where(distances > 0, outside, log(0.9)), 0)
    enough = -log(FALSE_EXCLUSION)
    return (_largest_stakes(claims, tokens.lengths) >= enough) | (_largest_stakes(draws, tokens.lengths) >= enough)


def count(
    tokens: ScreenedTokens, turns_N: NDArray[np.int64]
) -> dict[tuple[int, int], tuple[list[int], list[int], float]]:
    """Return the counts of these tokens by (rollout, turn), as in `ScreenFindings.counts`. Tokens without a known
    random number u of their draw are not counted.
    """
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


def _differences(tokens: ScreenedTokens) -> NDArray[np.float64]:
    """Return the learner's log-probability of each token minus the log-probability that the node claimed, in nats; 0
    where the learner's is NaN.
    """
    return np.nan_to_num(tokens.learner_logprobs_N.astype(np.float64) - tokens.claims_N, nan=0.0)


def _largest_stakes(log_factors_N: NDArray[np.float64], lengths: Sequence[int]) -> NDArray[np.float64]:
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
