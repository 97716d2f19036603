"""Whether a node draws honestly, by what its rollouts have shown so far: a sequential test.

Two hypotheses of each token. *Honest*: it falls into the classes of evidence as those of honest nodes of the same
numerics do, q0. *Dishonest*: a share w of the tokens falls as what was not drawn falls, f: q1 = (1 - w) q0 + w f. Each
class of evidence then weighs ln(q1 / q0). Of draws and claims, for each w of `WEIGHTS`, a node has a running sum,

    S = max(0, S + what its rollout weighs)                 (CUSUM: Page, Biometrika 41, 1954)

and is convicted once any of them reaches ln(number of sums / false_alarm). Honest nodes reach that no more often than
once in 1 / false_alarm checked rollouts on average, however long they live (Lorden, Ann. Math. Statist. 42, 1971):
under honesty e**(what a rollout weighs) has mean 1. That holds for the rollout as a whole, so one that is beyond doubt
by itself convicts at once.

Honest claims err by rounding, to both sides alike, so the mean of their errors x, in log-odds, each cut at c =
`CLAIM_CUT` nats, is near zero, however coarse the class; that of log-probabilities that are all claimed somewhat too
high is not. So two more sums, one for each sign, weigh

    +-x / c - psi    a token,    psi = (e - 2) v / c**2 + v / c

of which e**(what it weighs) has mean 1 at most (Bennett, J. Amer. Stat. Assoc. 57, 1962; v is the mean of x**2 that
honest nodes of the class show). The second term is for the mean itself: of claims that are true of what was drawn with
it is v at most.

    q4_k_m:  psi = 0.35 of a class that nobody has shown anything of, 0.18 once it knows its v; a token of temperature
             0.7 then weighs 0.1 on average

Another temperature multiplies log-odds, so that most of its claims fall far outside of what rounding does.

    q4_k_m:  of temperature 0.7 half of the tokens err by more than a nat, of honest ones one in a thousand: five to
             eight rollouts of four tokens convict

But all rollouts of a group begin alike, so that where rounding moves the odds of one token by that much, eight rollouts
say so. Of claims, in classes that round, four tokens count as one (`Honest.claims_dispersion`).

Whoever computes in fewer bits than it says draws and claims nearly what it should, but nearly all of its claims are off
by more than rounding of the precision that it names. So in classes that hardly round one more sum weighs every token's
claim, w = 1, as if f were what the coarsest honest engine shows.

    q8_0 that says float32:  a token weighs 2.0 on average, so that 9 tokens convict; one of f16, which an engine that
                             says float32 may well keep its cache in, weighs -0.6

Three shares w, because nobody knows how much is forged: all of a short answer, every tenth token, or a few tokens
behind a long prefix that was drawn honestly, which speaks for the node all the while.

    float32, w = 0.2:  an honest token weighs -0.22 and one far outside its interval +7.8, so that three of the latter
                       convict, or four among forty honest ones

The other way round, a node counts as *proven* once its draws weigh less than ln(miss) (Wald, Ann. Math. Statist. 16,
1945, with the same reset): one that forges a fifth of its tokens passes for honest in one of 1 / miss trials at most.
"""

from __future__ import annotations

from math import e, log
from typing import Final

from echo_hub.core.trust.evidence import CLAIM_CUT, Evidence
from echo_hub.core.trust.numerics import COARSEST, Honest, Shares

WEIGHTS: Final = (0.2, 0.02, 0.002)
"""Shares of dishonest tokens that are looked for."""
DISHONEST_DRAWS: Final[Shares] = (0.0, 0.02, 0.05, 0.10, 0.25, 0.58)
"""How tokens fall that were not drawn by their u: where it lies has nothing to do with their interval. Of those
of re-rolls that are outside at all, 96 of 100 were measured to be so by more than 0.05 nats, 85 by more than 0.2, 65 by
more than 0.5."""
DISHONEST_CLAIMS: Final[Shares] = (0.0, 0.01, 0.03, 0.08, 0.18, 0.70)
"""How invented log-probabilities fall; those of a temperature of 0.7 or 1.5 do so as well, but for tokens that every
policy is sure of."""

FINE: Final = 0.9
"""Classes whose honest claims are right to a hundredth so often are not to be coarse. Those of others may differ among
themselves by as much as their precision's name leaves open: kernels, caches."""

Sums = tuple[float, ...]
"""Of draws for each of `WEIGHTS`, then of claims, then of claims as coarse as can be, then of claims that are too low
and of those that are too high."""
NOTHING: Final[Sums] = (0.0,) * (2 * len(WEIGHTS) + 3)


def weigh(evidence: Evidence, honest: Honest) -> Sums:
    """What these tokens weigh against their node, for each of the sums; below zero they speak for it."""
    allowed = evidence.num_claims * _bias_allowed(honest.variance)
    biases = ((sign * evidence.bias / CLAIM_CUT - allowed) / honest.claims_dispersion for sign in (1.0, -1.0))
    coarser = COARSEST.claims if honest.claims[0] > FINE else honest.claims
    tests = [
        *((evidence.draws, honest.draws, DISHONEST_DRAWS, w, honest.dispersion) for w in WEIGHTS),
        *((evidence.claims, honest.claims, DISHONEST_CLAIMS, w, honest.claims_dispersion) for w in WEIGHTS),
        (evidence.claims, honest.claims, coarser, 1.0, honest.claims_dispersion),
    ]
    counted = (
        sum(count * weight for count, weight in zip(counts, log_ratios(shares, dishonest, w), strict=True) if count)
        / dispersion
        for counts, shares, dishonest, w, dispersion in tests
    )
    return (*counted, *biases)


def _bias_allowed(variance: float) -> float:
    """psi."""
    return (e - 2.0) * variance / CLAIM_CUT**2 + variance / CLAIM_CUT


def log_ratios(honest: Shares, dishonest: Shares, w: float) -> Shares:
    """ln(q1 / q0) of each class."""
    return tuple(log(1.0 - w + w * false / true) for true, false in zip(honest, dishonest, strict=True))


def added(sums: Sums, weighed: Sums) -> Sums:
    """The sums after one more rollout."""
    return tuple(max(0.0, one + more) for one, more in zip(sums, weighed, strict=True))


def alarm(false_alarm: float) -> float:
    """What a sum reaches when its node is convicted."""
    return log(len(NOTHING) / false_alarm)


def proof_added(proof: float, weighed: Sums) -> float:
    """What speaks for a node: its draws alone, for they cannot be invented."""
    return min(0.0, proof + weighed[0])
