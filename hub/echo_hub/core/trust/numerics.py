"""Classes of numerics, and what honest nodes of each show.

A class is what a node says of its engine: backend, precision, kind of device. It begins with a *prior*, the shares that
honest engines of such precision were measured to show, and learns from its own nodes, as long as these are in good
standing. Who claims a class that is not its own gains little: all that a claim changes are these shares, and what a
class learns stays within `DRIFT` of its prior; so the widest that anybody can claim is what an honest engine of four
bits shows.

    shares = (PRIOR_TOKENS * prior + what its nodes have shown) / (PRIOR_TOKENS + their tokens)

which is the mean of a Dirichlet distribution. No prior has a share below `LEAST`: no single token convicts anybody.

How much honest claims scatter is learned likewise, as the mean square of their errors. Its prior is the most that the
prior's shares allow, as if every error lay at the upper edge of its class.

    variance = (VARIANCE_TOKENS * most + the squares that its nodes have shown) / (VARIANCE_TOKENS + their tokens)

It is never more than what the class's shares allow, nor less than `LEAST_VARIANCE` of its prior, whatever is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, NamedTuple

from echo_hub.core.trust.evidence import CLAIM_CUT, CLAIM_EDGES, NO_EVIDENCE, Evidence

Shares = tuple[float, ...]

PRIOR_TOKENS: Final = 4_000.0
"""What the prior weighs."""
DRIFT: Final = 4.0
"""What a class learns of each answer but the best is at most so many times its prior, and at least such a part of it:
exact engines that claim a coarse class do not have its honest nodes convicted."""
LEAST: Final = 1e-5
VARIANCE_TOKENS: Final = 1_000.0
"""What the prior of the variance weighs. Where honest claims scatter half as much, that is more than three standard
deviations of the mean of as many squares as a class shows before they are known to a few hundredths."""
LEAST_VARIANCE: Final = 0.5
"""Of the prior. The priors have twice the tails that honest engines show."""
MOST_CLASSES: Final = 256
"""Names are the nodes' own: whoever comes with another one after these shares the last class."""
_MOST_ERRORS: Final = (*(min(edge, CLAIM_CUT) for edge in CLAIM_EDGES), CLAIM_CUT)


class NumericsClass(NamedTuple):
    """What a node says of its engine; empty = not said."""

    backend: str = ""
    precision: str = ""
    device: str = ""
    """The kind: cpu, cuda, metal ..."""

    def __str__(self) -> str:
        return "/".join(part or "?" for part in self)


NOT_SAID: Final = NumericsClass()
OTHERS: Final = NumericsClass("others")


@dataclass(frozen=True, slots=True)
class Honest:
    """How honest tokens fall into the classes of both questions."""

    draws: Shares
    claims: Shares
    misses: Shares
    """Draws by PROBABILITY_EDGES, of which nothing is learned: for comparisons of what two found of the same ones."""
    dispersion: float = 1.0
    """How much more the counts of draws vary than if tokens had nothing to do with each other: what speaks against a
    node is divided by it. A tempered likelihood ratio alarms no oftener than the whole one (Jensen)."""
    claims_dispersion: float = 1.0
    """The same of claims. All rollouts of a group begin alike, and where an engine's rounding moves the odds of a token
    by much, it does so in each of them."""
    learned_variance: float | None = None
    """None: nothing was learned."""

    @property
    def variance(self) -> float:
        """The mean square of a claim's error, each cut at `CLAIM_CUT`, nats**2."""
        return _most_variance(self.claims) if self.learned_variance is None else self.learned_variance


_FULL: Final = Honest(
    draws=(0.9985, 0.001, 0.0003, 1e-4, 5e-5, 5e-5),
    misses=(0.9985, 0.001, 0.0003, 1e-4, 5e-5, 5e-5),
    claims=(0.975, 0.02, 0.0036, 0.001, 0.0003, 0.0001),
)
_F16: Final = Honest(
    draws=(0.9975, 0.0019, 4e-4, 1e-4, 5e-5, 5e-5),
    misses=(0.998, 0.0012, 5e-4, 2e-4, 5e-5, 5e-5),
    claims=(0.68, 0.30, 0.0175, 0.0015, 0.0007, 0.0003),
)
_EIGHT: Final = Honest(
    draws=(0.9864, 0.0092, 0.0040, 0.0003, 7e-5, 3e-5),
    misses=(0.991, 0.004, 0.0035, 0.0012, 0.0002, 0.0001),
    claims=(0.26, 0.30, 0.392, 0.043, 0.004, 0.001),
    claims_dispersion=4.0,
)
_BF16: Final = replace(_EIGHT, draws=(0.986, 0.0092, 0.004, 0.0006, 0.00015, 5e-5), dispersion=1.5)
_FOUR: Final = Honest(
    draws=(0.97763, 0.0094, 0.0101, 0.0023, 0.0005, 7e-5),
    misses=(0.9822, 0.007, 0.006, 0.0035, 0.0012, 0.0001),
    claims=(0.215, 0.205, 0.35, 0.195, 0.031, 0.004),
    dispersion=1.5,
    claims_dispersion=4.0,
)
COARSEST: Final = Honest(
    draws=(0.961, 0.009, 0.018, 0.0084, 0.003, 0.0006),
    misses=(0.9582, 0.011, 0.014, 0.010, 0.0065, 0.0003),
    claims=(0.16, 0.115, 0.245, 0.31, 0.13, 0.04),
    dispersion=1.5,
    claims_dispersion=4.0,
)
PRIORS: Final[Mapping[str, Honest]] = MappingProxyType(
    {
        "f32": _FULL,
        "float32": _FULL,
        "f16": _F16,
        "float16": _F16,
        "bf16": _BF16,
        "bfloat16": _BF16,
        "q8_0": _EIGHT,
        "q6_k": _FOUR,
        "q5_k_m": _FOUR,
        "q4_k_m": _FOUR,
    }
)
"""By precision, with about twice the tails that the built-in model showed on the engines here, in the worst of three
runs: draws of 7,000 rollouts after 12 steps and 4,000 after 100, claims of 4,000 after 12 and as many after 150. Any
other, and none, counts as the coarsest, four bits rounded to nearest: whoever lies may claim that one anyway."""


def prior(numerics: NumericsClass) -> Honest:
    """What honest nodes of the class show, before any of them was seen."""
    return PRIORS.get(numerics.precision.lower(), COARSEST)


class Numerics:
    """What the nodes in good standing have shown, class by class."""

    def __init__(self) -> None:
        self._shown: dict[NumericsClass, Evidence] = {}

    def known(self, numerics: NumericsClass) -> NumericsClass:
        """The class, or the one that it shares."""
        if numerics in self._shown:
            return numerics
        if len(self._shown) >= MOST_CLASSES:
            numerics = OTHERS
        self._shown.setdefault(numerics, NO_EVIDENCE)
        return numerics

    def learn(self, numerics: NumericsClass, evidence: Evidence) -> None:
        """A node in good standing has shown this."""
        self._shown[numerics] = self._shown[numerics] + evidence

    def unlearn(self, numerics: NumericsClass, evidence: Evidence) -> None:
        """It is in good standing no more: all that was learned of it."""
        self._shown[numerics] = self._shown[numerics] - evidence

    def honest(self, numerics: NumericsClass, without: Evidence = NO_EVIDENCE) -> Honest:
        """What honest nodes of the class show, to the best of knowledge. `without`: what it has learned of one of them,
        who is to be judged: nobody is measured by himself."""
        before, shown = prior(numerics), self._shown.get(numerics, NO_EVIDENCE) - without
        claims = _posterior(before.claims, shown.claims)
        return Honest(
            draws=_posterior(before.draws, shown.draws),
            misses=before.misses,
            claims=claims,
            dispersion=before.dispersion,
            claims_dispersion=before.claims_dispersion,
            learned_variance=_posterior_variance(before.variance, shown, most=_most_variance(claims)),
        )


def _most_variance(claims: Shares) -> float:
    """The mean square of errors that fall so, if each is as large as its class allows."""
    return sum(share * most**2 for share, most in zip(claims, _MOST_ERRORS, strict=True))


def _posterior_variance(before: float, shown: Evidence, *, most: float) -> float:
    learned = (VARIANCE_TOKENS * before + shown.squares) / (VARIANCE_TOKENS + shown.num_tokens)
    return max(min(learned, most), LEAST_VARIANCE * before)


def _posterior(before: Shares, shown: tuple[int, ...]) -> Shares:
    total = PRIOR_TOKENS + sum(shown)
    tail = tuple(
        min(max((PRIOR_TOKENS * share + count) / total, share / DRIFT), DRIFT * share)
        for share, count in zip(before[1:], shown[1:], strict=True)
    )
    # Capped shares of a coarse class may come to more than there is.
    most = 0.99 / sum(tail) if sum(tail) > 0.99 else 1.0
    tail = tuple(share * most for share in tail)
    return (1.0 - sum(tail), *tail)
