"""Numerics classes: rounding scales of nodes' engines, and the sources of these scales.

A class is what a node reports of its engine: backend, precision, kind of device. Each class has a rounding scale
(`likelihood`) for draws and one for claims. Each is the most likely scale, rounded up by one step, from two sources:

    measured    tokens that the verifier sampled with emulated rounding of that precision, on the run's own base, and
                examined like a node's. They include the verifier's own rounding
    shown       tokens of the class's nodes in good standing, except those of the judged node

A class never counts as finer than measured. So exact engines that report a coarse class cannot cause convictions of
honest nodes. It counts as at most `LEARNED` steps coarser, unless several dissimilar nodes show it (`class_wide`).
Without a measurement, `DEFAULTS` apply.

A node with much finer claims than its class also samples as finely, and is judged on that finer scale. Otherwise it
could sample exactly, report rounding, and choose between neighbouring tokens wherever a coarse engine may pick either.
A node with coarse claims can still do that: see `shopping`.

A node is spared if rounding up to `TOLERANCE` steps above the class's scale explains the evidence: its kernels may
round more than the emulated ones.
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
"""Steps by which scales are rounded up."""
MOST_APART: Final = 4
"""Maximum number of steps by which an engine's draws may be coarser than its claims; measured are at most two."""
BOTH_EDGES: Final = 1
"""Steps by which claims are coarser than draws."""
LEARNED: Final = 2
"""Steps above the measured scale that a class can learn from its nodes: twice the scale."""
TOLERANCE: Final = 2
"""Steps above a measured scale that an honest node may reach: twice the scale."""
TOLERANCE_UNMEASURED: Final = 4
"""Tolerance in steps for default scales: four times the scale."""
LEAST_TOKENS: Final = 200
"""Minimum number of tokens for a scale."""
UNLIKE_NODES: Final = 3
"""Number of nodes without a common address or invite that must agree to set a class's scale."""
AGREEMENT: Final = 2
"""Maximum distance in steps between their scales and the accused node's."""
COARSEST: Final = at_least(1.0)
"""Coarsest scale of any class, whatever its nodes show."""
TELLING: Final = 100
"""Expected claims beyond an edge that are needed to judge a node as finer than its class."""
FINER: Final = 32
"""A node is finer than its class if it shows at most one claim beyond an edge per `FINER` expected ones."""
MOST_CLASSES: Final = 256
"""Maximum number of classes. Nodes invent the names, so further nodes share the last class."""


class NumericsClass(NamedTuple):
    """A node's report about its engine; empty = not reported."""

    backend: str = ""
    precision: str = ""
    device: str = ""
    """Kind of device: cpu, cuda, metal ..."""

    def __str__(self) -> str:
        return "/".join(part or "?" for part in self)

    @property
    def rounding(self) -> str:
        """Return the rounding of an engine of this precision: one of `ROUNDINGS`."""
        return ROUNDINGS.get(self.precision.lower(), EXACT_ROUNDING)

    @property
    def kind(self) -> str:
        """Return the rounding, with all nearly exact roundings as one kind."""
        return FINE if self.rounding in ("f32", "f16", "bf16") else self.rounding


FINE: Final = "fine"
"""Kind of all nearly exact roundings."""
COARSE_ROUNDING: Final = "q4_0"
"""Four bits rounded to nearest, for the coarsest precisions and for nodes without a reported precision."""
EXACT_ROUNDING: Final = "f32"
"""Rounding for unknown precisions, which the protocol refuses: an invented name must not be judged more leniently."""
ROUNDINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("f32", "float32"), "f32"),
        **dict.fromkeys(("f16", "float16"), "f16"),
        **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
        **{name: name for name in ("q8_0", "q6_k", "q5_k_m", "q4_k_m")},
        **dict.fromkeys(("q4_0", "q3_k_m", ""), COARSE_ROUNDING),
    }
)
"""Rounding by reported precision."""


class CoarseClass(NamedTuple):
    """Class that several dissimilar nodes have shown to be coarser than measured or assumed."""

    numerics: NumericsClass
    draws: float
    """Scale of draws, nats."""
    claims: float
    """Scale of claims, nats."""


NOT_SAID: Final = NumericsClass()
OTHERS: Final = NumericsClass("others")


@dataclass(frozen=True, slots=True, kw_only=True)
class Honest:
    """Rounding of honest nodes of a class, as indices into `SCALES`."""

    draws: int
    claims: int
    tolerance: int = TOLERANCE
    """Steps above these scales that an honest node may reach."""

    def together(self, other: Honest) -> Honest:
        """Return the scales for findings of two classes about each other. Neither node is exact, so the scales add
        up."""
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
"""Default scales at temperature 1, by rounding.

Measured with real engines on a model of 135 M parameters with 49,152 tokens, rounded up.
"""


def default(numerics: NumericsClass, temperature: float = 1.0) -> Honest:
    """Return the assumed scales of a class without data. Scales grow as 1 / `temperature`."""
    known = DEFAULTS[numerics.rounding]
    hotter = 1.0 / temperature
    return Honest(
        draws=at_least(float(SCALES[known.draws]) * hotter),
        claims=at_least(float(SCALES[known.claims]) * hotter),
        tolerance=known.tolerance,
    )


class Numerics:
    """Scales of all classes. `temperature`: that of all leases."""

    def __init__(self, temperature: float = 1.0) -> None:
        self._temperature = temperature
        self._shown: dict[NumericsClass, Evidence] = {}
        self._measured: dict[str, Evidence] = {}
        self._class_wide: dict[NumericsClass, Honest] = {}

    def known(self, numerics: NumericsClass) -> NumericsClass:
        """Return the class, or the class that it shares."""
        if numerics in self._shown:
            return numerics
        if len(self._shown) >= MOST_CLASSES:
            numerics = OTHERS._replace(precision=numerics.precision)
        self._shown.setdefault(numerics, NO_EVIDENCE)
        return numerics

    def measured(self, rounding: str, evidence: Evidence) -> None:
        """Store the verifier's measurement of this rounding, replacing an earlier one.

        Measurements with too few tokens or non-finite numbers are ignored.
        """
        if evidence.num_tokens >= LEAST_TOKENS and evidence.is_finite:
            self._measured[rounding] = evidence

    def learn(self, numerics: NumericsClass, evidence: Evidence) -> None:
        """Add evidence of a node in good standing."""
        self._shown[numerics] = self._shown[numerics] + evidence

    def unlearn(self, numerics: NumericsClass, evidence: Evidence) -> None:
        """Remove all evidence learned from a node that lost its good standing."""
        self._shown[numerics] = self._shown[numerics] - evidence

    def honest(self, numerics: NumericsClass, without: Evidence = NO_EVIDENCE, shown: Evidence = NO_EVIDENCE) -> Honest:
        """Return the rounding of honest nodes of the class.

        `without`: evidence learned from the judged node. `shown`: its recent evidence, which may prove finer draws.
        """
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
        """Set the class's scale if dissimilar nodes agree on it.

        `shown`: recent evidence of dissimilar nodes of the class, the accused node first. Return the indices of nodes
        as coarse as the first one, if they number at least `UNLIKE_NODES` and half of all. Return an empty tuple if
        they disagree, or if forged tokens explain any node's evidence better than coarser rounding does.
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
        """Return the classes with scales set by several dissimilar nodes (`class_wide`)."""
        return tuple(
            CoarseClass(numerics, float(SCALES[agreed.draws]), float(SCALES[agreed.claims]))
            for numerics, agreed in self._class_wide.items()
        )

    def restore(self, classes: Iterable[CoarseClass]) -> None:
        """Restore `coarser_than_measured` from before a restart."""
        for numerics, draws, claims in classes:
            agreed = Honest(draws=at_least(draws), claims=at_least(claims))
            self._class_wide[self.known(numerics)] = agreed


def _most_likely(shown: Evidence) -> tuple[int, int]:
    """Return the most likely scales of draws and of claims, as indices.

    Few draws miss their interval, and claims of a likely token err by the sum of both interval edges. So the claims
    give a lower bound for the draws' scale.
    """
    claims = int(np.argmax(shown.claims_CS[0]))
    return max(int(np.argmax(shown.draws_CS[0])), claims - BOTH_EDGES), claims


def _draws_shown(shown: Evidence, measured: Evidence) -> int | None:
    """Return the scale of draws proven by unusually fine claims; None: not proven.

    The node's claims must lie within an edge far more often than measured for its class. Claims err by the sum of both
    interval edges, and mostly by far less than the maximum, so the edge is a generous scale.
    """
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
    """Return True if forged tokens, a share or all, at the old scale are likelier than honest ones at the new scale.

    Also return True if draws are much coarser than claims, as no engine's are.
    """
    draws_CS, claims_CS = shown.draws_CS, shown.claims_CS
    draws, claims = _most_likely(shown)
    if draws_CS[0, agreed.draws] <= 0.0 or draws > claims + MOST_APART:
        return True
    forged_draws = (draws_CS[1:] + draws_CS[0])[:, before.draws].max()
    forged_claims = (claims_CS[1:4] + claims_CS[0])[:, before.claims].max()
    return bool(forged_draws > draws_CS[0, agreed.draws] or forged_claims > claims_CS[0, agreed.claims])
