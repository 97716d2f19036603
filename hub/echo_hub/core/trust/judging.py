"""Judgement of a node by what its rollouts have shown so far: a sequential test.

For every *alternative* to honesty - forged draws or invented claims at a share w of `WEIGHTS`, claims that are all too
low or all too high, rounding far coarser than the node says - a node has a sum

    S = max(0, S + Σ ln(alternative / honest))                       (CUSUM: Page, Biometrika 41, 1954)

over the tokens of each checked rollout, both at the scale of rounding of its class (`numerics`). It is convicted once
any sum reaches ln(alternatives / false_alarm). Honest nodes reach that no more often than once in 1 / false_alarm
checked rollouts on average, however long they live (Lorden, Ann. Math. Statist. 42, 1971), because e**(what a rollout
weighs) has mean 1 at most under honesty. That holds if the class's scale is not too small; it is rounded up, and a node
that reaches the alarm is spared as long as somewhat coarser rounding explains its last tokens as well as forgery does
(`is_explained`). A forger cannot pass for such a node: its honest tokens show how finely it rounds.

All rollouts of a group begin alike, so an engine that rounds one claim by much does so in each of them, and one that
moves an edge by much may miss it in several. What speaks against a node is therefore divided by `CLAIMS_DISPERSION`
and `DRAWS_DISPERSION`, which lowers false alarms alone (Jensen).

Three shares w, because nobody knows how much is forged: all of a short answer, every tenth token, or a few tokens
behind a long honest prefix.

The other way round, a node counts as *proven* once its draws weigh less than ln(miss) (Wald, Ann. Math. Statist. 16,
1945, with the same reset): one that forges a fifth of its tokens passes for honest in one of 1 / miss trials at most.
"""

from __future__ import annotations

from enum import IntEnum
from math import inf, log
from typing import Final

import numpy as np

from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.likelihood import NUM_SCALES, WEIGHTS
from echo_hub.core.trust.numerics import COARSEST, Honest

CLAIMS_DISPERSION: Final = 8.0
"""Rollouts of a group, as a rule."""
DRAWS_DISPERSION: Final = 1.5
COARSER: Final = 6
"""Steps: claims of a node that rounds eight times as coarsely as its class are looked for as such."""


class Alternative(IntEnum):
    """What a node may do instead of being honest: the places of its sums. The first three are for the shares of
    `WEIGHTS`, and so are the next three."""

    DRAWS_FORGED = 0
    CLAIMS_INVENTED = 3
    CLAIMS_TOO_LOW = 6
    CLAIMS_TOO_HIGH = 7
    COARSER_THAN_SAID = 8


Sums = tuple[float, ...]
"""Nats against a node, by alternative."""
NOTHING: Final[Sums] = (0.0,) * (len(Alternative) + 2 * (len(WEIGHTS) - 1))


def weigh(evidence: Evidence, honest: Honest) -> Sums:
    """Nats that these tokens weigh against their node, by alternative; below zero they speak for it."""
    claims_CS, coarser = evidence.claims_CS, honest.claims + COARSER
    # Beyond the coarsest scale there is nothing to look for.
    coarse = claims_CS[0, coarser] - claims_CS[0, honest.claims] if coarser < NUM_SCALES else 0.0
    of_draws = evidence.draws_CS[1:, honest.draws] / DRAWS_DISPERSION
    of_claims = np.append(claims_CS[1:, honest.claims], coarse) / CLAIMS_DISPERSION
    return (*of_draws.tolist(), *of_claims.tolist())


def added(sums: Sums, weighed: Sums) -> Sums:
    """The sums after one more rollout."""
    return tuple(max(0.0, one + more) for one, more in zip(sums, weighed, strict=True))


def judged(sums: Sums, evidence: Evidence, recent: Evidence, honest: Honest, enough: float) -> Sums:
    """The sums after one more rollout: none, where they reach `enough` and rounding explains what the node has shown.
    `recent`: what it has shown lately, without this."""
    sums = added(sums, weigh(evidence, honest))
    nats, alternative = against(sums)
    if nats >= enough and is_explained(recent + evidence, honest, alternative, enough):
        return NOTHING
    return sums


def against(sums: Sums) -> tuple[float, Alternative]:
    """The most that speaks against a node, nats, and for which alternative."""
    place = sums.index(max(sums))
    return sums[place], max(one for one in Alternative if one <= place)


def is_explained(recent: Evidence, honest: Honest, alternative: Alternative, nats: float) -> bool:
    """Return True if rounding of up to `Honest.tolerance` steps more than the class's explains `recent` tokens: forged
    or invented ones, a share or all of them, are then less than e**`nats` times as likely. Rounding explains neither
    claims that are off to one side nor an engine of far fewer bits."""
    if alternative is Alternative.DRAWS_FORGED:
        curves_CS, scale, all_forged = recent.draws_CS, honest.draws, 0.0
    elif alternative is Alternative.CLAIMS_INVENTED:
        curves_CS, scale, all_forged = recent.claims_CS, honest.claims, -inf
    else:
        return False
    forged = max(all_forged, (curves_CS[1 : 1 + len(WEIGHTS), scale] + curves_CS[0, scale]).max())
    most = min(scale + honest.tolerance, max(scale, COARSEST))
    return bool(forged - curves_CS[0, scale : most + 1].max() < nats)


def alarm(false_alarm: float) -> float:
    """What a sum reaches when its node is convicted, nats."""
    return log(len(NOTHING) / false_alarm)


def proof_added(proof: float, evidence: Evidence, honest: Honest) -> float:
    """What speaks for a node, at most 0 nats: its draws alone, for they cannot be invented."""
    return min(0.0, proof + float(evidence.draws_CS[1, honest.draws]))
