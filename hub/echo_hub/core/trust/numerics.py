"""Classes of numerics: how coarsely the nodes of each round, and how that is known.

A class is what a node says of its engine: backend, precision, kind of device. Of each class the scale of its rounding
(`likelihood`) is kept, for draws and for claims, as the most likely one of

    measured    tokens that the verifier drew as an engine of that precision would, on the run's own base, and examined
                like a node's. The verifier's own rounding is part of what it finds.
    shown       tokens of the class's nodes in good standing, without those of the node that is judged

rounded up by one step. A class is never taken for finer than was measured, so exact engines that claim a coarse class
convict no honest node. It is taken for no more than `LEARNED` steps coarser, unless several unlike nodes show it
(`class_wide`). Where nothing was measured, `DEFAULTS` stand in its place.

A node whose claims are far finer than its class's draws as finely: it is judged by that. Else it could draw exactly,
say that it rounds, and choose among neighbouring tokens wherever a coarse engine may draw either. A node whose claims
are as coarse can still do that: see `shopping`.

A node is convicted only if rounding of up to `TOLERANCE` steps more than its class's does not explain what it shows:
its kernels may round more than the emulated ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from echo_hub.core.trust.evidence import CLAIM_EDGES, NO_EVIDENCE, Evidence
from echo_hub.core.trust.likelihood import NUM_SCALES, SCALES, at_least

ROUNDED_UP: Final = 1
"""Steps."""
MOST_APART: Final = 4
"""Steps by which an engine's draws may be coarser than its claims; measured are two at most."""
BOTH_EDGES: Final = 1
"""Steps by which claims are coarser than draws."""
LEARNED: Final = 2
"""Steps above what was measured that a class's nodes can teach it: twice the scale."""
TOLERANCE: Final = 2
TOLERANCE_UNMEASURED: Final = 4
"""Where the scale is a default, four times the scale."""
LEAST_TOKENS: Final = 200
"""Tokens that tell a node's scale."""
UNLIKE_NODES: Final = 3
"""Nodes that share neither an address nor an invite, and that show a class's scale if they agree."""
AGREEMENT: Final = 2
"""Steps that their scales lie apart from the accused node's at most."""
COARSEST: Final = at_least(1.0)
"""No class is taken for coarser, whatever its nodes show."""
TELLING: Final = 100
"""Claims beyond an edge that a node must have been expected to show before it can be judged as finer than its class."""
FINER: Final = 32
"""A node is finer than its class if it shows at most one claim beyond an edge for each `FINER` that are expected."""
MOST_CLASSES: Final = 256
"""Names are the nodes' own: nodes with further ones share the last class."""


class NumericsClass(NamedTuple):
    """What a node says of its engine; empty = not said."""

    backend: str = ""
    precision: str = ""
    device: str = ""
    """The kind: cpu, cuda, metal ..."""

    def __str__(self) -> str:
        return "/".join(part or "?" for part in self)

    @property
    def rounding(self) -> str:
        """How an engine of this precision rounds: one of `ROUNDINGS`."""
        return ROUNDINGS.get(self.precision.lower(), EXACT_ROUNDING)

    @property
    def kind(self) -> str:
        """Its rounding, but for those that round next to nothing: they are one kind."""
        return FINE if self.rounding in ("f32", "f16", "bf16") else self.rounding


FINE: Final = "fine"
COARSE_ROUNDING: Final = "q4_0"
"""Four bits rounded to nearest: of the coarsest precisions, and of nodes that say none."""
EXACT_ROUNDING: Final = "f32"
"""Of precisions that are not known, which the protocol refuses: no invented name is judged more gently than a true one.
"""
ROUNDINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("f32", "float32"), "f32"),
        **dict.fromkeys(("f16", "float16"), "f16"),
        **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
        **{name: name for name in ("q8_0", "q6_k", "q5_k_m", "q4_k_m")},
        **dict.fromkeys(("q4_0", "q3_k_m", ""), COARSE_ROUNDING),
    }
)
"""By precision."""


class CoarseClass(NamedTuple):
    """A class that several unlike nodes have shown to be coarser than was measured or assumed."""

    numerics: NumericsClass
    draws: float
    """Scale of draws, nats."""
    claims: float
    """Scale of claims, nats."""


NOT_SAID: Final = NumericsClass()
OTHERS: Final = NumericsClass("others")


@dataclass(frozen=True, slots=True, kw_only=True)
class Honest:
    """How coarsely honest nodes of a class round: places in `SCALES`."""

    draws: int
    claims: int
    tolerance: int = TOLERANCE
    """Steps above that an honest node may be."""

    def together(self, other: Honest) -> Honest:
        """Return the scales for what nodes of two classes find of each other: neither is exact, so they add up."""
        return Honest(
            draws=at_least(float(SCALES[self.draws] + SCALES[other.draws])),
            claims=at_least(float(SCALES[self.claims] + SCALES[other.claims])),
            tolerance=max(self.tolerance, other.tolerance),
        )


def _default(draws: float, claims: float) -> Honest:
    return Honest(draws=at_least(draws), claims=at_least(claims), tolerance=TOLERANCE_UNMEASURED)


DEFAULTS: Final[Mapping[str, Honest]] = MappingProxyType(
    {
        **dict.fromkeys(("f32", "f16"), _default(0.0055, 0.0055)),
        "bf16": _default(0.0625, 0.088),
        "q8_0": _default(0.125, 0.177),
        **dict.fromkeys(("q6_k", "q5_k_m", "q4_k_m"), _default(0.354, 0.5)),
        COARSE_ROUNDING: _default(0.5, 0.7),
    }
)
"""At temperature 1, by rounding, where nothing was measured: as real engines show on a model of 135 M parameters with
49,152 tokens, rounded up."""


def default(numerics: NumericsClass, temperature: float = 1.0) -> Honest:
    """What is assumed of a class of which nothing is known. Scales grow as 1 / `temperature`."""
    known = DEFAULTS[numerics.rounding]
    hotter = 1.0 / temperature
    return Honest(
        draws=at_least(float(SCALES[known.draws]) * hotter),
        claims=at_least(float(SCALES[known.claims]) * hotter),
        tolerance=known.tolerance,
    )


class Numerics:
    """What is known of each class. `temperature` of all leases."""

    def __init__(self, temperature: float = 1.0) -> None:
        self._temperature = temperature
        self._shown: dict[NumericsClass, Evidence] = {}
        self._measured: dict[str, Evidence] = {}
        self._class_wide: dict[NumericsClass, Honest] = {}

    def known(self, numerics: NumericsClass) -> NumericsClass:
        """The class, or the one that it shares."""
        if numerics in self._shown:
            return numerics
        if len(self._shown) >= MOST_CLASSES:
            numerics = OTHERS._replace(precision=numerics.precision)
        self._shown.setdefault(numerics, NO_EVIDENCE)
        return numerics

    def measured(self, rounding: str, evidence: Evidence) -> None:
        """Take what the verifier has drawn with this rounding and examined, in place of what it found before; but not
        what says too little, or is no number."""
        if evidence.num_tokens >= LEAST_TOKENS and evidence.is_finite:
            self._measured[rounding] = evidence

    def learn(self, numerics: NumericsClass, evidence: Evidence) -> None:
        """Add what a node in good standing has shown."""
        self._shown[numerics] = self._shown[numerics] + evidence

    def unlearn(self, numerics: NumericsClass, evidence: Evidence) -> None:
        """Forget all that was learned of a node that is in good standing no more."""
        self._shown[numerics] = self._shown[numerics] - evidence

    def honest(self, numerics: NumericsClass, without: Evidence = NO_EVIDENCE, shown: Evidence = NO_EVIDENCE) -> Honest:
        """Return how coarsely honest nodes of the class round, as far as it is known. `without`: what was learned of
        the node that is to be judged; `shown`: what it has shown lately, by which its draws may be finer."""
        known = self._honest(numerics, without)
        finest = _draws_shown(shown, self._measured.get(numerics.rounding, NO_EVIDENCE))
        return known if finest is None else replace(known, draws=min(known.draws, finest))

    def _honest(self, numerics: NumericsClass, without: Evidence) -> Honest:
        measured = self._measured.get(numerics.rounding)
        least = default(numerics, self._temperature)
        if measured is not None:
            draws, claims = _most_likely(measured)
            least = Honest(draws=_rounded_up(draws), claims=_rounded_up(claims))
        shown = self._shown.get(numerics, NO_EVIDENCE) - without
        if shown.num_tokens >= LEAST_TOKENS:
            draws, claims = _most_likely(shown)
            least = Honest(
                draws=max(least.draws, min(_rounded_up(draws), least.draws + LEARNED)),
                claims=max(least.claims, min(_rounded_up(claims), least.claims + LEARNED)),
                tolerance=least.tolerance,
            )
        agreed = self._class_wide.get(numerics)
        if agreed is None:
            return least
        return Honest(
            draws=max(least.draws, agreed.draws),
            claims=max(least.claims, agreed.claims),
            tolerance=least.tolerance,
        )

    def class_wide(self, numerics: NumericsClass, shown: Sequence[Evidence]) -> tuple[int, ...]:
        """Have unlike nodes that agree set the class's scale.

        `shown`: what unlike nodes of the class have shown lately, the accused one first. Returns the places of those
        that round as coarsely as the first one, if these are `UNLIKE_NODES` and half of all. Empty: they do not agree,
        or forged tokens explain what one of them shows better than coarser rounding does.
        """
        before = self.honest(numerics)
        scales = [_most_likely(one) for one in shown]
        alike = tuple(
            place
            for place, (draws, claims) in enumerate(scales)
            if abs(draws - scales[0][0]) <= AGREEMENT and abs(claims - scales[0][1]) <= AGREEMENT
        )
        agreed = Honest(
            draws=min(max(scales[place][0] for place in alike) + ROUNDED_UP, COARSEST),
            claims=min(max(scales[place][1] for place in alike) + ROUNDED_UP, COARSEST + 1),
            tolerance=before.tolerance,
        )
        if max(scales[place][0] for place in alike) > COARSEST:
            return ()
        is_coarser = agreed.draws > before.draws or agreed.claims > before.claims
        is_agreed = len(alike) >= UNLIKE_NODES and 2 * len(alike) >= len(shown)
        if not (is_coarser and is_agreed) or any(_looks_forged(shown[place], before, agreed) for place in alike):
            return ()
        self._class_wide[numerics] = agreed
        return alike

    @property
    def coarser_than_measured(self) -> tuple[CoarseClass, ...]:
        """Classes whose scale several unlike nodes have set (`class_wide`)."""
        return tuple(
            CoarseClass(numerics, float(SCALES[agreed.draws]), float(SCALES[agreed.claims]))
            for numerics, agreed in self._class_wide.items()
        )

    def restore(self, classes: Iterable[CoarseClass]) -> None:
        """Take over `coarser_than_measured` of before a restart."""
        for numerics, draws, claims in classes:
            agreed = Honest(draws=at_least(draws), claims=at_least(claims))
            self._class_wide[self.known(numerics)] = agreed


def _most_likely(shown: Evidence) -> tuple[int, int]:
    """The places of the scales of draws and of claims. Few draws miss their interval, and claims of a likely token are
    off by as much as both edges of its interval together: the scale of draws is no smaller than that allows."""
    claims = int(np.argmax(shown.claims_CS[0]))
    return max(int(np.argmax(shown.draws_CS[0])), claims - BOTH_EDGES), claims


def _draws_shown(shown: Evidence, measured: Evidence) -> int | None:
    """The scale of draws of a node whose claims are within an edge far more often than was measured of its class; None:
    they are not, or too few to tell. Claims are off by as much as both edges of an interval together, and most of them
    by far less than the farthest, so the edge is a generous scale."""
    if not measured.num_claims:
        return None
    scale = shown.num_claims / measured.num_claims
    for place, edge in enumerate(CLAIM_EDGES):
        expected = scale * sum(measured.claims[place + 1 :])
        if expected >= TELLING and sum(shown.claims[place + 1 :]) * FINER <= expected:
            return at_least(edge)
    return None


def _rounded_up(place: int) -> int:
    return min(place + ROUNDED_UP, NUM_SCALES - 1)


def _looks_forged(shown: Evidence, before: Honest, agreed: Honest) -> bool:
    """Return True if forged tokens, a share or all of them, at the class's old scale are likelier than honest ones at
    the new one; or if draws are much coarser than claims, as no engine's are."""
    draws_CS, claims_CS = shown.draws_CS, shown.claims_CS
    draws, claims = _most_likely(shown)
    if draws_CS[0, agreed.draws] <= 0.0 or draws > claims + MOST_APART:
        return True
    forged_draws = (draws_CS[1:] + draws_CS[0])[:, before.draws].max()
    forged_claims = (claims_CS[1:4] + claims_CS[0])[:, before.claims].max()
    return bool(forged_draws > draws_CS[0, agreed.draws] or forged_claims > claims_CS[0, agreed.claims])
