"""Likelihood of a node's results, if the node is honest and rounds with a given scale.

An honest node computes the same logits as the verifier, up to rounding. A token's interval is the range of cumulative
probability within which the uniform number u draws this token. Rounding moves each edge of the interval, and the
token's own probability, by noise in log-odds. The noise follows Student's t with a scale s in nats. Two densities
follow, for a token with interval [b, b + p) under the verifier:

    draw    f(u) = (T((L(u) - L(b)) / s) - T((L(u) - L(b + p)) / s)) / p      u: uniform number of the token's draw
    claim   g(x) = t(x / s) / s                                              x: the true less the claimed log-odds

T is the distribution function of Student's t with four degrees of freedom, t its density with two; L(x) = ln((x + TAIL)
/ (1 - x + TAIL)) is the log-odds, bounded where little probability is left. If the token is forged, u has density 1.
Narrow intervals need no special case: f is flat there, so an unlikely token tells little about honesty. A likely token
tells much.

One scale describes the rounding noise of an engine. Measured on a model of 135 M parameters with 49,152 tokens: real
engines of 16, 8 and 4 bits fit four to six degrees of freedom best, and the scale differs by at most 1.3 times between
likely and unlikely tokens. The rounding of a small model that is sure of most tokens varies by prompt. Two degrees of
freedom allow for that in claims, which show every token's rounding.

The scale grows as 1 / temperature. So log-odds of a token that was drawn at another temperature than the run's are
multiplied by its *warmth*, the ratio of both temperatures. Then an engine shows the same scale at all temperatures.

Both densities are computed for every scale of `SCALES`. A small share `OUTLIERS` of the density of forged tokens is
mixed in, so that no single token convicts a node. All sums over tokens are additive, so evidence of several rollouts
adds up and can be read at any scale later. `edge_curves` are a third kind: the frequency of u near an edge
(`shopping`).

Dimensions: N tokens, S scales, C curves.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

SCALES: Final[NDArray[np.float64]] = 2.0 ** (np.arange(-16, 5) / 2)
"""[S] scales in nats, from .0039 to 4 in steps of the square root of 2. Float32 engines with a half-precision cache are
at the lower end."""
NUM_SCALES: Final = len(SCALES)
WEIGHTS: Final = (0.2, 0.02, 0.002)
"""Assumed shares w of forged tokens. Each share is tested as one alternative to honesty."""
TAIL: Final = 1e-3
"""Probability that is added to x and to 1 - x in the log-odds L(x): less probability than this is mostly rounding
error."""
OUTLIERS: Final = 1e-4
"""Share of an honest node's tokens that may look forged, for example after a flipped bit or a driver fault. One token
weighs at most ln(w / OUTLIERS) = 7.6 nats."""
INVENTED: Final = 2.0
"""Scale in nats of the density of invented claims (log-probabilities), which lie far from the true log-odds."""
LEAST_WIDTH: Final = 1e-9
"""Minimum width of the interval of cumulative probability that draws a token, so that no division overflows."""
MOST_APART: Final = 100.0
"""Limit of the difference between true and claimed log-odds, in nats."""
SHIFT: Final = 0.25
"""Step, in nats, at which common errors (shifts) of all claims are tested. If honest claims of the class are shifted by
k steps, the alternative to honesty is a shift by k + 1 steps. The test detects claims that are shifted by at least half
a step more than honest ones."""
SHIFTS: Final = 4
"""Number of shifts k = 0, 1, ... that honest claims may have in each direction."""
DRAW_CURVES: Final = 1 + len(WEIGHTS)
"""Number C of draw curves: the log-likelihood under honesty, and one log-ratio for each of `WEIGHTS`."""
CLAIM_CURVES: Final = DRAW_CURVES + 2 * SHIFTS
"""Number C of claim curves: first the same curves as for draws, then log-ratios of too low claims, by shift, then
log-ratios of too high claims."""
EDGE_CURVES: Final = 2
"""Number C of edge curves: tokens near an edge minus their expected number, and the variance of that number."""
NEAR: Final = 0.75
"""The uniform number u of a draw is near an edge of the token's interval of cumulative probability if their log-odds
differ by at most this many rounding scales."""
_LEAST_BESIDE: Final = 1e-6
"""If the probability below or above a token's interval is at most this, the interval has no edge there: a node finds no
neighbouring token beyond it."""
_MOST_NEAR: Final = 500.0
"""Upper bound of the distance, in nats of log-odds, within which u counts as near an edge. It keeps its exponential
finite."""
_ALL_NEAR: Final = 0.98
"""Largest share of a token's interval that may lie near its edges. If more lies near them, u is near an edge wherever
it falls, so the token counts for nothing."""


def draw_curves(
    below_N: NDArray[np.float64],
    logprobs_N: NDArray[np.float64],
    u_N: NDArray[np.float64],
    warmth_N: NDArray[np.float64] | float = 1.0,
) -> NDArray[np.float64]:
    """Return draw curves [C, S, N]: ln f, and ln(1 - w + w / f) for each of `WEIGHTS`. f is the density of the uniform
    u if the node is honest (see the module).

    The interval of cumulative probability that draws a token begins at `below_N` and is exp(`logprobs_N`) wide.
    """
    width_N = np.maximum(np.exp(logprobs_N), LEAST_WIDTH)
    drawn_N = bounded_log_odds(u_N)
    from_low_SN = warmth_N * (drawn_N - bounded_log_odds(below_N)) / SCALES[:, None]
    from_high_SN = warmth_N * (drawn_N - bounded_log_odds(below_N + width_N)) / SCALES[:, None]
    far_SN, near_SN = _beyond(from_low_SN), _beyond(from_high_SN)
    # Subtract tails of the distribution function T instead of values of T: values near 1 have no digits left.
    is_inside_SN = (from_low_SN > 0) & (from_high_SN < 0)
    mass_SN = np.where(is_inside_SN, 1.0 - far_SN - near_SN, np.abs(far_SN - near_SN))
    return _with_forged((1.0 - OUTLIERS) / width_N * mass_SN + OUTLIERS, 1.0)


def greedy_curves(shortfall_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the counterpart of `draw_curves` for greedy choices.

    `shortfall_N`: x, each token's log-probability gap to the likeliest token at the run's temperature, in nats.
    P = 2 T(-x / s) bounds the probability that rounding of scale s moves two logits so far apart. 1 / (2 sqrt(P)) then
    has mean at most 1 under honesty, like 1 / f in `draw_curves` (Vovk and Wang, Ann. Stat. 49, 2021, section 2).
    """
    chance_SN = 2.0 * _beyond(shortfall_N / SCALES[:, None])
    return _with_forged(2.0 * (1.0 - OUTLIERS) * np.sqrt(chance_SN) + OUTLIERS, 1.0)


def claim_curves(differences_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return claim curves [C, S, N] of true minus claimed log-odds, in nats, each multiplied by its token's warmth.

    Curves: ln g, with g the density of the differences if the node is honest; ratios of invented claims for each of
    `WEIGHTS`; ratios of claims all too low, then too high, for each of `SHIFTS`. An honest node claims what it sampled,
    and samples what its own rounding makes likelier. So its claims are on average too high by half of the noise's
    variance, s**2. Only a larger excess counts as too high.

    Coarse rounding can also shift all claims: it loses a part of what training has added to the weights, so a trained
    policy computed in 16 bits or fewer is less sure of its tokens.
    """
    differences_N = differences_N.clip(-MOST_APART, MOST_APART)
    invented_N = _density(differences_N / INVENTED) / INVENTED
    scales_S1 = SCALES[:, None]

    def claimed(shifted_SN: NDArray[np.float64]) -> NDArray[np.float64]:
        honest_SN = _density(shifted_SN / scales_S1) / scales_S1
        return np.asarray((1.0 - OUTLIERS) * honest_SN + OUTLIERS * invented_N)

    # The class's scale is rounded up by one step, so half of its square is the square of the measured scale.
    usual_S1 = scales_S1**2 / 2.0
    steps = SHIFT * np.arange(SHIFTS + 1)
    low_KSN = np.log([claimed(differences_N[None, :] - step) for step in steps])
    high_KSN = np.log([claimed(differences_N + usual_S1 + step) for step in steps])
    honest_SN = np.exp(low_KSN[0])
    return np.concatenate([_with_forged(honest_SN, invented_N), np.diff(low_KSN, axis=0), np.diff(high_KSN, axis=0)])


def edge_curves(
    below_N: NDArray[np.float64],
    logprobs_N: NDArray[np.float64],
    u_N: NDArray[np.float64],
    warmth_N: NDArray[np.float64] | float = 1.0,
) -> NDArray[np.float64]:
    """Return edge curves [C, S, N]: 1 if the draw's uniform u is near an edge of the token's interval, minus the share
    m of the interval near edges; and the variance m (1 - m).

    The interval of cumulative probability that draws a token begins at `below_N` and is exp(`logprobs_N`) wide. u is
    near an edge if it is outside of the interval, or inside within `NEAR` scales of an edge.
    """
    width_N = np.maximum(np.exp(logprobs_N), LEAST_WIDTH)
    above_N = np.minimum(below_N + width_N, 1.0)
    factor_SN = np.exp(np.minimum(NEAR * SCALES[:, None] / warmth_N, _MOST_NEAR))
    from_SN = np.where(below_N > _LEAST_BESIDE, _from_odds(_bounded_odds(below_N) * factor_SN), below_N)
    until_SN = np.where(above_N < 1.0 - _LEAST_BESIDE, _from_odds(_bounded_odds(above_N) / factor_SN), above_N)
    share_SN = 1.0 - ((until_SN - from_SN) / width_N).clip(0.0, 1.0)
    share_SN[share_SN > _ALL_NEAR] = 1.0
    is_near_SN = (u_N < from_SN) | (u_N >= until_SN) | (share_SN == 1.0)
    return np.stack([is_near_SN - share_SN, share_SN * (1.0 - share_SN)])


def chance_of_distance(nats: float, place: int) -> float:
    """Return a bound on the probability that honest rounding moves an edge by at least `nats` of log-odds.

    `place` is the index of the rounding scale in `SCALES`. Outliers (`OUTLIERS`) are not allowed for.
    """
    return float(2.0 * _beyond(np.array(nats / SCALES[place])))


def at_least(scale: float) -> int:
    """Return the index in `SCALES` of the smallest scale that is at least `scale`; the last index for larger scales."""
    place = int(np.searchsorted(SCALES, scale * (1.0 - 1e-9)))
    return min(place, NUM_SCALES - 1)


def bounded_log_odds(probability_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ln((x + TAIL) / (1 - x + TAIL)) for each probability x: its log-odds, bounded where little probability is
    left."""
    odds: NDArray[np.float64] = np.log(_bounded_odds(probability_N))
    return odds


def _bounded_odds(probability_N: NDArray[np.float64]) -> NDArray[np.float64]:
    inside_N = probability_N.clip(0.0, 1.0)
    odds: NDArray[np.float64] = (inside_N + TAIL) / (1.0 - inside_N + TAIL)
    return odds


def _from_odds(odds_SN: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probabilities x with e**L(x) = `odds_SN`, within 0 and 1."""
    found: NDArray[np.float64] = ((odds_SN * (1.0 + TAIL) - TAIL) / (1.0 + odds_SN)).clip(0.0, 1.0)
    return found


def _with_forged(honest_SN: NDArray[np.float64], forged: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """Return ln `honest_SN`, and ln(1 - w + w forged / honest) for each of `WEIGHTS`, from the densities under honesty
    and under forgery."""
    ratios_SN = forged / honest_SN
    return np.log(np.stack([honest_SN, *(1.0 - w + w * ratios_SN for w in WEIGHTS)]))


def _beyond(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return T(-|x|), where T is the distribution function of Student's t with four degrees of freedom.

    With r = sqrt(4 + x**2) and y = |x| / r it is (1 - y)**2 (2 + y) / 4, where 1 - y = 4 / (r (r + |x|)) keeps its
    digits for large x.
    """
    size = np.abs(x)
    root = np.sqrt(4.0 + size * size)
    left = 4.0 / (root * (root + size))
    tail: NDArray[np.float64] = left * left * (3.0 - left) / 4.0
    return tail


def _density(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the density of Student's t with two degrees of freedom, t(x) = (1 + x**2 / 2)**(-3/2) / sqrt(8)."""
    around = 1.0 + x * x / 2.0
    density: NDArray[np.float64] = 1.0 / (around * np.sqrt(8.0 * around))
    return density
