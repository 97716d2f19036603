"""Sequential test of a node's checked rollouts.

Each *alternative* to honesty has a sum. The alternatives are: forged draws or invented claims at a share w of
`WEIGHTS`; claims all too low or all too high; rounding far coarser than reported; tokens chosen by reward (`shopping`).
The sum

    S = max(0, S + Σ ln(alternative / honest))                       (CUSUM: Page, Biometrika 41, 1954)

runs over the tokens of each checked rollout, at the scale of rounding of the node's class (`numerics`). A node is
convicted once a sum reaches ln(alternatives / false_alarm). An honest node reaches that once in 1 / false_alarm checked
rollouts on average, or less often (Lorden, Ann. Math. Statist. 42, 1971), because e**(weight of a rollout) has mean 1
at most under honesty. This requires a large enough scale of the class, so scales are rounded up. A node that reaches
the alarm is spared while somewhat coarser rounding explains its last tokens as well as forgery does (`is_explained`). A
forger cannot pass for such a node, because its honest tokens show how finely it rounds.

The rollouts of a group begin alike. So a large rounding error of one claim recurs in each rollout of the group, and one
of an edge in several. The weights are therefore divided by `CLAIMS_DISPERSION` and `DRAWS_DISPERSION`, which can only
lower the rate of false alarms (Jensen).

There are three shares w because the forged share is unknown: all of a short answer, every tenth token, or a few tokens
behind a long honest prefix.

In the other direction, a node counts as *proven* once its draws weigh less than ln(miss) (Wald, Ann. Math. Statist. 16,
1945, with the same reset). A node that forges a fifth of its tokens passes for honest in one of 1 / miss trials at
most.
"""

from __future__ import annotations

from enum import IntEnum
from math import log
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.likelihood import NUM_SCALES, WEIGHTS
from echo_hub.core.trust.numerics import COARSEST, Honest

CLAIMS_DISPERSION: Final = 4.0
DRAWS_DISPERSION: Final = 1.5
"""Divisors of the weights. With both, the highest sum of honest nodes in 5,000 rollouts was 1.0 for Q4_K_M at
temperature 1, 1.4 at .6, and 4.9 for Q8_0 at .6; the alarm is at 16 (`python -m benchmarks trust --only 'real*'`)."""
COARSER: Final = 6
"""Scale steps (a factor of 8) between a class and the alternative of a coarser engine."""
TILTS: Final = (0.2, 0.4, 0.8)
"""Strengths of the dependence between edges and rewards in the alternatives (`shopping`)."""


class Alternative(IntEnum):
    """Alternatives to honesty, by the index of their first sum. `DRAWS_FORGED` and `CLAIMS_INVENTED` have one sum per
    element of `WEIGHTS`, `SHOPPED` one per element of `TILTS`."""

    DRAWS_FORGED = 0
    CLAIMS_INVENTED = 3
    CLAIMS_TOO_LOW = 6
    CLAIMS_TOO_HIGH = 7
    COARSER_THAN_SAID = 8
    SHOPPED = 9


Sums = tuple[float, ...]
"""Nats against a node, by alternative."""
NOTHING: Final[Sums] = (0.0,) * (len(Alternative) + 2 * (len(WEIGHTS) - 1) + len(TILTS) - 1)


def weigh(evidence: Evidence, honest: Honest) -> Sums:
    """Return the nats of these tokens against their node, by alternative; below zero they speak for the node. `SHOPPED`
    needs the reward: see `shopping.weigh`."""
    claims_CS, coarser = evidence.claims_CS, honest.claims + COARSER
    # No alternative is coarser than the coarsest scale.
    coarse = claims_CS[0, coarser] - claims_CS[0, honest.claims] if coarser < NUM_SCALES else 0.0
    of_draws = evidence.draws_CS[1:, honest.draws] / DRAWS_DISPERSION
    of_claims = np.append(claims_CS[1:, honest.claims], coarse) / CLAIMS_DISPERSION
    return (*of_draws.tolist(), *of_claims.tolist(), *NOTHING[Alternative.SHOPPED :])


def added(sums: Sums, weighed: Sums) -> Sums:
    """Return the sums after one more rollout."""
    return tuple(max(0.0, one + more) for one, more in zip(sums, weighed, strict=True))


def judged(sums: Sums, evidence: Evidence, recent: Evidence, honest: Honest, enough: float) -> Sums:
    """Return the sums after one more rollout.

    A sum that reaches `enough` restarts at 0 if coarser rounding explains the node's evidence; other sums continue.
    `recent`: the node's recent evidence, without this rollout.
    """
    grown = added(sums, weigh(evidence, honest))
    return tuple(
        0.0 if nats >= enough and is_explained(recent + evidence, honest, _alternative(place), enough) else nats
        for place, nats in enumerate(grown)
    )


def against(sums: Sums) -> tuple[float, Alternative]:
    """Return the largest sum against a node, in nats, and its alternative."""
    place = sums.index(max(sums))
    return sums[place], _alternative(place)


def _alternative(place: int) -> Alternative:
    """Return the alternative of the sum at this place."""
    return max(one for one in Alternative if one <= place)


def is_explained(recent: Evidence, honest: Honest, alternative: Alternative, nats: float) -> bool:
    """Return True if rounding of up to `Honest.tolerance` steps more than the class's explains `recent` tokens.

    Forged or invented tokens, a share or all of them, are then less than e**`nats` times as likely. Too high claims are
    explained if a coarser scale lowers their sum below `nats`: an engine's claims are too high by half of the noise's
    variance. Rounding explains neither claims that are too low nor an engine of far fewer bits, nor rewards.
    """
    draws, claims = (
        slice(scale, min(scale + honest.tolerance, max(scale, COARSEST)) + 1) for scale in (honest.draws, honest.claims)
    )
    if alternative is Alternative.DRAWS_FORGED:
        return bool(max(0.0, _forged(recent.draws_CS, honest.draws)) - recent.draws_CS[0, draws].max() < nats)
    if alternative is Alternative.CLAIMS_INVENTED:
        return bool(_forged(recent.claims_CS, honest.claims) - recent.claims_CS[0, claims].max() < nats)
    if alternative is Alternative.CLAIMS_TOO_HIGH:
        return bool(recent.claims_CS[-1, claims].min() < nats)
    return False


def _forged(curves_CS: NDArray[np.float64], scale: int) -> float:
    """Return the log-likelihood of the likeliest share of forged tokens."""
    return float((curves_CS[1 : 1 + len(WEIGHTS), scale] + curves_CS[0, scale]).max())


def alarm(false_alarm: float) -> float:
    """Return the sum in nats at which a node is convicted."""
    return log(len(NOTHING) / false_alarm)


def proof_added(proof: float, evidence: Evidence, honest: Honest) -> float:
    """Return the sum for a node, at most 0 nats. Only draws count, because they cannot be invented."""
    return min(0.0, proof + float(evidence.draws_CS[1, honest.draws]))
