"""Evidence of a node's honesty from recomputing its tokens, as sums over tokens.

Two questions are asked of each token, under the policy version that the node names:

    draw    does the uniform number u[t], which the lease's seed fixes and the node must sample with, lie within the
            token's interval of the cumulative distribution? If not, how far outside?
    claim   how far are the node's reported log-odds ln(p / (1 - p)) of the token from the recomputed ones?

Rounding moves logits, so it moves the log-odds of likely and unlikely tokens equally. Log-probabilities would hide
that: at 99 % probability, an honest claim errs by at most a hundredth. A claim of probability 1 for a token of
probability 1 tells nothing about rounding and does not count. Otherwise a policy that is sure of most tokens would make
its engine look exact.

Tokens that were drawn at another temperature than the run's count in nats of the run's temperature (`likelihood`).

`Evidence` keeps the log-likelihoods of `likelihood` at every rounding scale, for decisions. It also counts tokens by
the size of their error, for people and for the learner's comparison of nodes. All fields add up over rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from echo_hub.core.trust.likelihood import (
    CLAIM_CURVES,
    DRAW_CURVES,
    EDGE_CURVES,
    NUM_SCALES,
    claim_curves,
    draw_curves,
    edge_curves,
    greedy_curves,
)
from echo_shared.sampling.draws import nats_outside

DRAW_EDGES: Final = (0.001, 0.05, 0.2, 0.5, 1.0)
"""Upper edges of the error classes of draws. The error is the distance, in nats of log-odds, of the uniform number u
from the interval of cumulative probability in which u draws the token. The last class has no upper edge."""
PROBABILITY_EDGES: Final = (1e-4, 0.005, 0.02, 0.05, 0.2)
"""Upper edges of the error classes of draws in the learner's comparison of a step's nodes. The error is the distance of
u from the token's interval, in cumulative probability under the learner's newer policy."""
CLAIM_EDGES: Final = (0.01, 0.05, 0.2, 0.5, 1.0)
"""Upper edges of the error classes of claims. The error is the absolute difference of true and claimed log-odds, in
nats."""
CLAIM_CUT: Final = 0.5
"""Limit in nats of each token's difference (true minus claimed log-odds) in `Evidence.bias`, so that few large
differences do not hide many small ones."""
SURE: Final = 1e-3
"""All probabilities closer to 1 than this get the same log-odds: there, 1 - p is mostly rounding error."""
_SURE: Final = float(np.log1p(-SURE))
_LEAST_LOG_RATIO: Final = -1e3
"""Lower bound of ln(true / claimed), so that the KL divergence stays finite for a true probability of 0."""
_MOST_LOG_RATIO: Final = 20.0
"""Upper bound of ln(true / claimed), so that the KL divergence of one token stays finite."""
_TOGETHER: Final = 4_096
"""Number of tokens whose curves (log-likelihoods at each rounding scale) are computed together; they take 7 MB."""

Curves = bytes
"""Curves (log-likelihoods at each rounding scale, see `likelihood`), summed over tokens: float64 values row by row, as
bytes to save memory per node."""
_NO_DRAWS: Final[Curves] = np.zeros(DRAW_CURVES * NUM_SCALES).tobytes()
_NO_CLAIMS: Final[Curves] = np.zeros(CLAIM_CURVES * NUM_SCALES).tobytes()
_NO_EDGES: Final[Curves] = np.zeros(EDGE_CURVES * NUM_SCALES).tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Evidence about the honesty of one node, as sums over tokens that it sampled, in one rollout or several."""

    draws: tuple[int, ...]
    """Number of tokens in each error class of `DRAW_EDGES`. In the learner's comparison of the nodes of a step, the
    classes are those of `PROBABILITY_EDGES`."""
    claims: tuple[int, ...]
    """Number of tokens in each error class of `CLAIM_EDGES`, without greedy choices and tokens of probability 1."""
    mismatch_kl: float = 0.0
    """Sum over tokens of the k3 estimate of the KL divergence from claimed to true probabilities, in nats."""
    bias: float = 0.0
    """Sum over tokens of true minus claimed log-odds, each limited to ±`CLAIM_CUT` nats."""
    draw_curves: Curves = _NO_DRAWS
    """Log-likelihoods of the draws at each rounding scale: `likelihood.draw_curves` summed over tokens, [DRAW_CURVES,
    NUM_SCALES], in nats. All 0 in the learner's comparison of nodes."""
    claim_curves: Curves = _NO_CLAIMS
    """Log-likelihoods of the claims at each rounding scale: `likelihood.claim_curves` summed over tokens,
    [CLAIM_CURVES, NUM_SCALES], in nats."""
    near_edges: Curves = _NO_EDGES
    """Tokens whose draw was near an edge, at each rounding scale: `likelihood.edge_curves` summed over tokens,
    [EDGE_CURVES, NUM_SCALES], in tokens. All 0 for greedy choices and in the learner's comparison of nodes."""

    @property
    def num_tokens(self) -> int:
        return sum(self.draws)

    @property
    def num_claims(self) -> int:
        return sum(self.claims)

    @property
    def draws_CS(self) -> NDArray[np.float64]:
        return np.frombuffer(self.draw_curves).reshape(DRAW_CURVES, NUM_SCALES)

    @property
    def claims_CS(self) -> NDArray[np.float64]:
        return np.frombuffer(self.claim_curves).reshape(CLAIM_CURVES, NUM_SCALES)

    @property
    def edges_CS(self) -> NDArray[np.float64]:
        return np.frombuffer(self.near_edges).reshape(EDGE_CURVES, NUM_SCALES)

    @classmethod
    def of_spans(
        cls,
        below_N: NDArray[np.float64],
        logprobs_N: NDArray[np.float64],
        uniforms_N: NDArray[np.float64],
        claims_N: NDArray[np.floating],
        num_tokens: Sequence[int],
        *,
        greedy_N: NDArray[np.bool_] | None = None,
        warmth_N: NDArray[np.float64] | None = None,
        draw_weights_N: NDArray[np.float64] | None = None,
        claim_weights_N: NDArray[np.float64] | None = None,
    ) -> list[Evidence]:
        """Return the evidence of each of several consecutive spans, which are parts of a completion drawn by one node
        each.

        `below_N` [N]: lower end of the interval of cumulative probability that draws each token; for greedy choices,
        the log-probability gap to the likeliest token, in nats. `logprobs_N` [N]: true log-probabilities; `claims_N`
        [N]: claimed ones, nats. `uniforms_N` [N]: uniforms of the draws. `num_tokens`: tokens of each span. `greedy_N`
        [N]: True for greedy choices, whose claims and uniforms are ignored. `warmth_N` [N]: temperature of each draw,
        divided by the run's; None = the run's. `draw_weights_N` and `claim_weights_N` [N]: factors of the
        draws and of the claims in the curves, at most 1; None = 1. No value may be NaN.
        """
        warmth_N = np.ones(len(below_N)) if warmth_N is None else warmth_N
        ends = np.cumsum(num_tokens)
        starts = ends - np.asarray(num_tokens, np.int64)
        outside_N = warmth_N * nats_outside(below_N, logprobs_N, uniforms_N)
        differences_N = warmth_N * (log_odds(logprobs_N) - log_odds(claims_N))
        ratios_N = (logprobs_N - claims_N).clip(_LEAST_LOG_RATIO, _MOST_LOG_RATIO)
        drawn_N = None if greedy_N is None or not greedy_N.any() else ~greedy_N
        if drawn_N is not None:
            outside_N = np.where(drawn_N, outside_N, below_N)
            differences_N, ratios_N = np.where(drawn_N, differences_N, 0.0), np.where(drawn_N, ratios_N, 0.0)
        claimed_N = np.minimum(logprobs_N, claims_N) < _SURE
        if greedy_N is not None:
            claimed_N &= ~greedy_N
        draws_KC = np.zeros((len(ends), DRAW_CURVES * NUM_SCALES))
        claims_KC = np.zeros((len(ends), CLAIM_CURVES * NUM_SCALES))
        edges_KC = np.zeros((len(ends), EDGE_CURVES * NUM_SCALES))
        for start in range(0, len(below_N), _TOGETHER):
            part = slice(start, start + _TOGETHER)
            draws_CSN = draw_curves(below_N[part], logprobs_N[part], uniforms_N[part], warmth_N[part])
            claims_CSN = claim_curves(differences_N[part])
            claims_CSN[..., ~claimed_N[part]] = 0.0
            edges_CSN = edge_curves(below_N[part], logprobs_N[part], uniforms_N[part], warmth_N[part])
            if drawn_N is not None:
                is_greedy = ~drawn_N[part]
                draws_CSN[..., is_greedy] = greedy_curves(below_N[part][is_greedy])
                edges_CSN[..., is_greedy] = 0.0
            if draw_weights_N is not None:
                draws_CSN *= draw_weights_N[part]
                edges_CSN *= draw_weights_N[part]
            if claim_weights_N is not None:
                claims_CSN *= claim_weights_N[part]
            draws_KC += _summed(draws_CSN, starts - start, ends - start)
            claims_KC += _summed(claims_CSN, starts - start, ends - start)
            edges_KC += _summed(edges_CSN, starts - start, ends - start)
        spans_N = np.repeat(np.arange(len(ends)), num_tokens)
        sums = (np.expm1(ratios_N) - ratios_N, differences_N.clip(-CLAIM_CUT, CLAIM_CUT))
        fields = zip(
            _counted(outside_N, DRAW_EDGES, spans_N, len(ends)),
            _counted(np.abs(differences_N), CLAIM_EDGES, spans_N, len(ends), weights_N=claimed_N),
            *(np.bincount(spans_N, summed, len(ends)).tolist() for summed in sums),
            draws_KC,
            claims_KC,
            edges_KC,
            strict=True,
        )
        return [
            cls(
                draws=tuple(draws),
                claims=tuple(claims),
                mismatch_kl=kl,
                bias=bias,
                draw_curves=curves.tobytes(),
                claim_curves=own.tobytes(),
                near_edges=edges.tobytes(),
            )
            for draws, claims, kl, bias, curves, own, edges in fields
        ]

    @classmethod
    def of(cls, below: ArrayLike, logprobs: ArrayLike, uniforms: ArrayLike, claims: ArrayLike) -> Evidence:
        """Return the evidence of one part of a completion, drawn by one node. The arguments are those of `of_spans`."""
        arrays = [np.asarray(values, np.float64) for values in (below, logprobs, uniforms, claims)]
        (found,) = cls.of_spans(arrays[0], arrays[1], arrays[2], arrays[3], [len(arrays[0])])
        return found

    @classmethod
    def of_differences(cls, differences: ArrayLike) -> Evidence:
        """Return evidence from claims alone, not from draws. `differences`: for each token, its true log-odds minus
        those that the node claimed, in nats."""
        found = np.asarray(differences, np.float64)
        (claims,) = _counted(np.abs(found), CLAIM_EDGES, np.zeros(len(found), np.int64), 1)
        curves = claim_curves(found).sum(axis=-1)
        bias = float(found.clip(-CLAIM_CUT, CLAIM_CUT).sum())
        return replace(NO_EVIDENCE, claims=tuple(claims), bias=bias, claim_curves=curves.tobytes())

    def __add__(self, other: Evidence) -> Evidence:
        return self._combined(other, 1)

    def __sub__(self, other: Evidence) -> Evidence:
        """Return this evidence minus `other`, a part of it."""
        return self._combined(other, -1)

    def _combined(self, other: Evidence, sign: int) -> Evidence:
        return Evidence(
            draws=tuple(a + sign * b for a, b in zip(self.draws, other.draws, strict=True)),
            claims=tuple(a + sign * b for a, b in zip(self.claims, other.claims, strict=True)),
            mismatch_kl=self.mismatch_kl + sign * other.mismatch_kl,
            bias=self.bias + sign * other.bias,
            draw_curves=_combined(self.draw_curves, other.draw_curves, sign),
            claim_curves=_combined(self.claim_curves, other.claim_curves, sign),
            near_edges=_combined(self.near_edges, other.near_edges, sign),
        )

    @property
    def counts(self) -> Evidence:
        """Return the evidence without its curves (log-likelihoods at each rounding scale), which take most of its
        memory."""
        return replace(self, draw_curves=_NO_DRAWS, claim_curves=_NO_CLAIMS, near_edges=_NO_EDGES)

    @property
    def is_finite(self) -> bool:
        return all(np.isfinite(curves_CS).all() for curves_CS in (self.draws_CS, self.claims_CS, self.edges_CS))

    @property
    def halved(self) -> Evidence:
        """Return the evidence with every sum halved; counts are rounded down. Old tokens lose weight this way."""
        return Evidence(
            draws=tuple(count // 2 for count in self.draws),
            claims=tuple(count // 2 for count in self.claims),
            mismatch_kl=self.mismatch_kl / 2,
            bias=self.bias / 2,
            draw_curves=(self.draws_CS / 2).tobytes(),
            claim_curves=(self.claims_CS / 2).tobytes(),
            near_edges=(self.edges_CS / 2).tobytes(),
        )


def _combined(one: Curves, other: Curves, sign: int) -> Curves:
    """Return `one` + `sign` · `other`. If `other` is a constant of zeros, return `one` itself, so that evidence without
    curves shares one object."""
    if any(other is nothing for nothing in (_NO_DRAWS, _NO_CLAIMS, _NO_EDGES)):
        return one
    return (np.frombuffer(one) + sign * np.frombuffer(other)).tobytes()


def log_odds(logprobs_N: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return ln(p / (1 - p)) in nats, bounded by `SURE`."""
    capped_N = np.minimum(logprobs_N.astype(np.float64), _SURE)
    return capped_N - np.log(-np.expm1(capped_N))


def _summed(values_CSN: NDArray[np.float64], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the sums over each of K spans (parts drawn by one node each), [K, C * S]. `values_CSN` covers only N
    consecutive tokens. `starts` and `ends` [K] are the spans' positions relative to the first of these tokens; tokens
    of a span outside of the N count as 0.
    """
    count = values_CSN.shape[-1]
    until_CSN = np.concatenate([np.zeros((*values_CSN.shape[:2], 1)), values_CSN.cumsum(axis=-1)], axis=-1)
    sums_CSK = until_CSN[..., ends.clip(0, count)] - until_CSN[..., starts.clip(0, count)]
    sums_KC: NDArray[np.float64] = sums_CSK.reshape(-1, len(starts)).T
    return sums_KC


def _counted(
    values_N: NDArray[np.float64],
    edges: tuple[float, ...],
    spans_N: NDArray[np.int64],
    num_spans: int,
    *,
    weights_N: NDArray[np.bool_] | None = None,
) -> list[list[int]]:
    """Return, for each span (part drawn by one node), the number of values in each class of `edges`. `weights_N`: False
    for values that do not count."""
    classes = len(edges) + 1
    places_N = (spans_N * classes + np.searchsorted(edges, values_N))[slice(None) if weights_N is None else weights_N]
    counts: list[list[int]] = np.bincount(places_N, minlength=num_spans * classes).reshape(-1, classes).tolist()
    return counts


NO_EVIDENCE: Final = Evidence(draws=(0,) * (len(DRAW_EDGES) + 1), claims=(0,) * (len(CLAIM_EDGES) + 1))
