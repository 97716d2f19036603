"""Sequential test of a node's checked rollouts.

Each *alternative* to honesty has a sum S in nats. The alternatives are: a share w (`WEIGHTS`) of the tokens does not
follow from the seed (forged draws), or has invented log-probabilities (claims); claims are all too low or all too high;
the engine rounds far more coarsely than reported; tokens are chosen by reward (`shopping`). The sum

    S = max(0, S + Σ ln(alternative / honest))                       (CUSUM: Page, Biometrika 41, 1954)

grows with the tokens of each checked rollout. Both likelihoods assume the rounding scale of the node's class
(`numerics`). A node is convicted once a sum reaches ln(alternatives / false_alarm). An honest node reaches that once in
1 / false_alarm checked rollouts on average, or less often (Lorden, Ann. Math. Statist. 42, 1971), because e**(what one
rollout adds to the sum) has a mean of at most 1 under honesty. The scale must not understate the node's rounding, so
scales are rounded up. A node whose sum reaches the alarm is spared if somewhat coarser rounding explains its recent
tokens as well as forgery does (`is_explained`). A forger cannot pass for a coarse engine, because its honest tokens
show how finely it rounds.

The rollouts of a group begin alike. So a large rounding error of one token recurs in the claims of each rollout of the
group, and in the draws of several. The log-likelihood ratios are therefore divided by `CLAIMS_DISPERSION` and
`DRAWS_DISPERSION`, which can only lower the rate of false alarms (Jensen).

There are three shares w because the forged share is unknown: it may be all of a short answer, every tenth token, or a
few tokens after a long honest prefix.

In the other direction, the sum of `proof_added` falls with honest draws. A node counts as *proven* once this sum is
below ln(miss) (Wald, Ann. Math. Statist. 16, 1945, with the same reset). A node that forges a fifth of its tokens
passes for honest in one of 1 / miss trials at most.
"""

from __future__ import annotations

from enum import IntEnum
from math import log
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.likelihood import DRAW_CURVES, NUM_SCALES, SHIFTS, WEIGHTS
from echo_hub.core.trust.numerics import COARSEST, Honest

CLAIMS_DISPERSION: Final = 4.0
DRAWS_DISPERSION: Final = 1.5
"""Divisors of the log-likelihood ratios of claims (reported log-probabilities) and of draws (sampled tokens). With
both, the highest sum of honest nodes in 5,000 rollouts was 1.0 for Q4_K_M at temperature 1, 1.4 at .6, and 4.9 for Q8_0
at .6; the alarm is at 16 (`python -m benchmarks trust --only 'real*'`)."""
COARSER: Final = 6
"""An engine of the alternative `COARSER_THAN_SAID` rounds more coarsely than its class by this many steps of
`likelihood.SCALES`: by a factor of 8."""
TILTS: Final = (0.2, 0.4, 0.8)
"""Assumed strengths λ with which a node that chooses tokens by reward prefers tokens whose random number u lies near an
edge between two tokens (`shopping`)."""


class Alternative(IntEnum):
    """The alternatives to honesty. An alternative's number is the index of its first sum in `Sums`. `DRAWS_FORGED` and
    `CLAIMS_INVENTED` have one sum per element of `WEIGHTS`, `SHOPPED` (tokens chosen by reward) one per element of
    `TILTS`."""

    DRAWS_FORGED = 0
    CLAIMS_INVENTED = 3
    CLAIMS_TOO_LOW = 6
    CLAIMS_TOO_HIGH = 7
    COARSER_THAN_SAID = 8
    SHOPPED = 9


Sums = tuple[float, ...]
"""Evidence against a node in nats, one sum per alternative (see `Alternative`)."""
NOTHING: Final[Sums] = (0.0,) * (len(Alternative) + 2 * (len(WEIGHTS) - 1) + len(TILTS) - 1)


def weigh(evidence: Evidence, honest: Honest) -> Sums:
    """Return the evidence of these tokens against their node in nats, by alternative; negative values speak for the
    node. The entries from `SHOPPED` on are 0: they need the reward, see `shopping.weigh`."""
    claims_CS, coarser = evidence.claims_CS, honest.claims + COARSER
    # If no scale is that coarse, the alternative has no evidence.
    coarse = claims_CS[0, coarser] - claims_CS[0, honest.claims] if coarser < NUM_SCALES else 0.0
    of_draws = evidence.draws_CS[1:, honest.draws] / DRAWS_DISPERSION
    rows = (*range(1, DRAW_CURVES), _too_low(honest), _too_high(honest))
    of_claims = np.append(claims_CS[rows, honest.claims], coarse) / CLAIMS_DISPERSION
    return (*of_draws.tolist(), *of_claims.tolist(), *NOTHING[Alternative.SHOPPED :])


def added(sums: Sums, weighed: Sums) -> Sums:
    """Return the CUSUM sums after one more rollout: each changes by the rollout's evidence `weighed`, but stays at
    least 0."""
    return tuple(max(0.0, one + more) for one, more in zip(sums, weighed, strict=True))


def judged(sums: Sums, evidence: Evidence, recent: Evidence, honest: Honest, enough: float) -> Sums:
    """Return the sums after one more rollout, sparing a node whose evidence coarser rounding explains.

    A sum that reaches `enough` nats and is explained restarts at 0; the other sums continue. `recent`: the node's
    recent evidence, without this rollout.
    """
    grown = added(sums, weigh(evidence, honest))
    return tuple(
        0.0 if nats >= enough and is_explained(recent + evidence, honest, _alternative(place), enough) else nats
        for place, nats in enumerate(grown)
    )


def against(sums: Sums) -> tuple[float, Alternative]:
    """Return the largest sum of evidence against a node, in nats, and the alternative to honesty that it speaks for."""
    place = sums.index(max(sums))
    return sums[place], _alternative(place)


def _alternative(place: int) -> Alternative:
    return max(one for one in Alternative if one <= place)


def is_explained(recent: Evidence, honest: Honest, alternative: Alternative, nats: float) -> bool:
    """Return True if an honest engine that rounds up to `Honest.tolerance` steps more coarsely than the class explains
    the `recent` tokens.

    Condition: no share of forged or invented tokens makes the evidence e**`nats` times likelier than such rounding.
    Claims that are too high are explained if a coarser scale lowers their sum below `nats`: the claims of an honest
    engine are too high by half of its noise's variance. Coarser rounding never explains claims that are too low, an
    engine of far fewer bits, or tokens chosen by reward.
    """
    draws, claims = (
        slice(min(scale + honest.tolerance, max(scale, COARSEST)) + 1) for scale in (honest.draws, honest.claims)
    )
    if alternative is Alternative.DRAWS_FORGED:
        return bool(max(0.0, _forged(recent.draws_CS, honest.draws)) - recent.draws_CS[0, draws].max() < nats)
    if alternative is Alternative.CLAIMS_INVENTED:
        return bool(_forged(recent.claims_CS, honest.claims) - recent.claims_CS[0, claims].max() < nats)
    if alternative is Alternative.CLAIMS_TOO_HIGH:
        return bool(recent.claims_CS[_too_high(honest), claims].min() < nats)
    return False


def _too_low(honest: Honest) -> int:
    """Return the row of the claim curves that tests for claims lower than those of honest nodes."""
    return DRAW_CURVES + honest.too_low


def _too_high(honest: Honest) -> int:
    return DRAW_CURVES + SHIFTS + honest.too_high


def _forged(curves_CS: NDArray[np.float64], scale: int) -> float:
    """Return the log-likelihood of the tokens under forgery, for the likeliest share of forged tokens in `WEIGHTS`."""
    return float((curves_CS[1 : 1 + len(WEIGHTS), scale] + curves_CS[0, scale]).max())


def alarm(false_alarm: float) -> float:
    """Return the sum of evidence, in nats, at which a node is convicted."""
    return log(len(NOTHING) / false_alarm)


def proof_added(proof: float, evidence: Evidence, honest: Honest) -> float:
    """Return the evidence that a node is honest, in nats, after one more rollout. The value is at most 0; a lower value
    shows honesty more surely. Only draws count, because a node can compute honest claims for forged tokens.
    """
    return min(0.0, proof + float(evidence.draws_CS[1, honest.draws]))
