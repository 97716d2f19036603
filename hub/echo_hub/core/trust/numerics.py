"""Numerics classes: rounding scales of nodes' engines, and the sources of these scales.

A class is what a node reports of its engine: backend, precision, kind of device. Each class has two rounding scales
(`likelihood`): one for draws and one for claims. Each scale makes a set of tokens most likely, rounded up by one step
of `SCALES`. The tokens come from two sources:

    measured    tokens that the verifier sampled from the run's own model with emulated rounding of that precision, and
                then examined like a node's. So the scale includes the verifier's own rounding
    shown       tokens of the class's nodes in good standing, except those of the judged node

The measurement also shows by how much honest claims of the class are all too low or too high. A class's own nodes may
raise that by one step of `likelihood.SHIFT`.

The scale of a class never falls below the measured one: exact engines that report a coarse class would otherwise cause
convictions of honest nodes. It rises at most `LEARNED` steps above it, unless several nodes without a common owner show
more (`class_wide`). Without a measurement, `DEFAULTS` apply.

A node whose claims are much finer than its class must also sample as finely, so its draws are judged on that finer
scale. Otherwise it could sample exactly, report a coarse engine, and choose between neighbouring tokens wherever a
coarse engine may pick either. A node with artificially coarse claims can still choose; `shopping` detects it.

A node is spared if a scale up to `TOLERANCE` steps above that of its class explains the evidence: its kernels may round
more than the emulated ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from echo_hub.core.trust.evidence import CLAIM_EDGES, NO_EVIDENCE, Evidence
from echo_hub.core.trust.likelihood import DRAW_CURVES, NUM_SCALES, SCALES, SHIFTS, at_least
from echo_shared.wire.messages.engines import weights_of_file

ROUNDED_UP: Final = 1
"""Number of steps of `SCALES` by which the most likely rounding scale is rounded up: a scale below the true one would
convict honest nodes.
"""
MOST_APART: Final = 4
"""Maximum number of steps of `SCALES` by which an honest engine's draws (sampled tokens) may show coarser rounding than
its claims (reported log-probabilities). At most two were measured."""
BOTH_EDGES: Final = 1
"""Steps of `SCALES` by which claims (reported log-probabilities) show coarser rounding than draws (sampled tokens): a
claimed probability is the difference of two cumulative probabilities, and errs by the rounding of both."""
LEARNED: Final = 2
"""Maximum number of steps of `SCALES` by which tokens of a class's own nodes may raise its rounding scale above the
measured one: up to twice the scale."""
TOLERANCE: Final = 2
"""Steps of `SCALES` above a measured rounding scale within which honest rounding still explains the evidence: up to
twice the scale."""
TOLERANCE_UNMEASURED: Final = 4
"""Steps of `SCALES` above a default rounding scale within which honest rounding still explains the evidence: up to four
times the scale."""
LEAST_TOKENS: Final = 200
"""Minimum number of tokens from which a rounding scale is computed."""
UNLIKE_NODES: Final = 3
"""Number of nodes without a common address or invite that must agree on a rounding scale to set that of their class."""
AGREEMENT: Final = 2
"""Maximum distance, in steps of `SCALES`, between the rounding scale of the accused node and those of the nodes that
agree with it."""
COARSEST: Final = at_least(1.0)
"""Largest rounding scale of draws that nodes can set for their class by agreement, as an index into `SCALES`."""
TELLING: Final = 100
"""Minimum expected number of a node's claims beyond an edge of `CLAIM_EDGES`, by the measurement of its class. With a
smaller expected number, the node is not examined for finer rounding than its class."""
FINER: Final = 32
"""Divisor of the expected number of claims beyond an edge of `CLAIM_EDGES`. A node rounds more finely than its class if
its claims beyond the edge number at most this quotient."""
MOST_CLASSES: Final = 256
"""Number of numerics classes from which on nodes of further classes share one class for each precision: nodes may
report any name."""
MEASURED_AGAIN: Final = 4
"""Sets how rarely a rounding is measured. After a measurement at version v, the next one is at version
`v + 1 + v // MEASURED_AGAIN`: at versions 0, 1, 2, 3, 4, 6, 8, 11 ..."""


class NumericsClass(NamedTuple):
    """What a node reports about its engine; empty = not reported. Nodes with equal reports form one class."""

    backend: str = ""
    precision: str = ""
    device: str = ""
    """Kind of device, such as cpu, cuda or metal."""

    def __str__(self) -> str:
        return "/".join(part or "?" for part in self)

    @property
    def rounding(self) -> str:
        """Return the rounding of an engine of this precision: one of `ROUNDINGS`. An engine that loads the run's GGUF
        file rounds like no other; its precision names its rounding.
        """
        if weights_of_file(self.precision) is not None:
            return self.precision
        return ROUNDINGS.get(self.precision.lower(), EXACT_ROUNDING)

    @property
    def assumed_rounding(self) -> str:
        """Return the rounding whose default scales hold for this class: a key of `DEFAULTS`."""
        weights = weights_of_file(self.precision)
        return self.rounding if weights is None else ROUNDINGS.get(weights, COARSE_ROUNDING)

    @property
    def kind(self) -> str:
        """Return the kind of rounding by which nodes are compared: all roundings of 16 bits and more form one kind."""
        return FINE if self.assumed_rounding in ("f32", "f16", "bf16") else self.rounding


FINE: Final = "fine"
"""Value of `NumericsClass.kind` for all roundings of 16 bits and more."""
COARSE_ROUNDING: Final = "q4_0"
"""Rounding assumed for the coarsest precisions and for nodes that report no precision: four bits, rounded to
nearest."""
EXACT_ROUNDING: Final = "f32"
"""Rounding assumed for unknown precisions, which the protocol refuses: an invented name must not be judged more
leniently than an exact engine."""
ROUNDINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("f32", "float32"), "f32"),
        **dict.fromkeys(("f16", "float16"), "f16"),
        **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
        **{name: name for name in ("q8_0", "q6_k", "q5_k_m", "q4_k_m")},
        **dict.fromkeys(("q4_0", "q3_k_m", ""), COARSE_ROUNDING),
    }
)
"""Rounding that is assumed for each reported precision."""


class CoarseClass(NamedTuple):
    """Numerics class (kind of engine) that several nodes without a common owner have shown to round more coarsely than
    measured or assumed."""

    numerics: NumericsClass
    draws: float
    """Rounding scale of draws (sampled tokens), in nats."""
    claims: float
    """Rounding scale of claims (reported log-probabilities), in nats."""


NOT_SAID: Final = NumericsClass()
OTHERS: Final = NumericsClass("others")


@dataclass(frozen=True, slots=True, kw_only=True)
class Honest:
    """Rounding scales of honest nodes of one numerics class (kind of engine), as indices into `SCALES`."""

    draws: int
    claims: int
    tolerance: int = TOLERANCE
    """Number of steps of `SCALES` by which an honest node may round more coarsely than these scales say."""
    too_low: int = 0
    too_high: int = 0
    """Steps of `likelihood.SHIFT` by which all honest claims may be too low (`too_low`), or too high (`too_high`)."""

    def together(self, other: Honest) -> Honest:
        """Return the rounding scales and shifts to allow when a node of this class and a node of `other` compare their
        results. Neither node is exact, so their scales add up. Shifts add up if they point in opposite directions.
        """
        shift = min(max(self.too_low + other.too_high, self.too_high + other.too_low), SHIFTS - 1)
        return Honest(
            draws=at_least(float(SCALES[self.draws] + SCALES[other.draws])),
            claims=at_least(float(SCALES[self.claims] + SCALES[other.claims])),
            tolerance=max(self.tolerance, other.tolerance),
            too_low=shift,
            too_high=shift,
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
"""Scales at temperature 1 that apply to a rounding without a measurement.

They were measured with real engines on a model of 135 M parameters with 49,152 tokens, and rounded up.
"""


def default(numerics: NumericsClass, temperature: float = 1.0) -> Honest:
    """Return the assumed rounding scales of a numerics class (kind of engine) without data. Scales grow as 1 /
    `temperature`."""
    known = DEFAULTS[numerics.assumed_rounding]
    hotter = 1.0 / temperature
    return Honest(
        draws=at_least(float(SCALES[known.draws]) * hotter),
        claims=at_least(float(SCALES[known.claims]) * hotter),
        tolerance=known.tolerance,
    )


class Numerics:
    """Rounding scales of all numerics classes (kinds of engine). `temperature`: sampling temperature of all leases.
    `gguf_precision`: precision that nodes with the run's GGUF file report; empty = the run has none."""

    def __init__(self, temperature: float = 1.0, *, gguf_precision: str = "") -> None:
        self._temperature = temperature
        self._gguf_precision = gguf_precision
        self._shown: dict[NumericsClass, Evidence] = {}
        self._measured_from: dict[str, int] = {}
        """Policy version from which each rounding must be measured again."""
        self._measured: dict[str, Evidence] = {}
        self._class_wide: dict[NumericsClass, Honest] = {}

    def known(self, numerics: NumericsClass) -> NumericsClass:
        """Return the class under which nodes that report `numerics` are judged. That is the reported class. Once
        `MOST_CLASSES` classes exist, all further classes of one precision share one common class. A precision that
        names a GGUF file which the hub does not offer counts as not reported. The hub may have offered another file
        before a restart.
        """
        if weights_of_file(numerics.precision) is not None and numerics.precision != self._gguf_precision:
            numerics = numerics._replace(precision="")
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
        """Add a proven node's evidence to that from which the rounding scale of its class is learned."""
        self._shown[numerics] = self._shown[numerics] + evidence

    def unlearn(self, numerics: NumericsClass, evidence: Evidence) -> None:
        """Remove a node's evidence from that of its class, because the node's proof no longer counts."""
        self._shown[numerics] = self._shown[numerics] - evidence

    def is_due(self, rounding: str, policy_version: int) -> bool:
        """Return True if the rounding must be measured with this version: first with version 0, and again once the
        version number has grown by a quarter. The measurement then counts as begun."""
        if policy_version < self._measured_from.get(rounding, 0):
            return False
        self._measured_from[rounding] = policy_version + 1 + policy_version // MEASURED_AGAIN
        return True

    def not_measured(self, rounding: str, policy_version: int) -> None:
        """Note that the measurement of this rounding with this version failed: it is due again with the next
        version."""
        self._measured_from[rounding] = policy_version + 1

    def honest(self, numerics: NumericsClass, without: Evidence = NO_EVIDENCE, shown: Evidence = NO_EVIDENCE) -> Honest:
        """Return the rounding scales of honest nodes of the class, for judging one node.

        `without`: evidence learned from this node, which must not count. `shown`: the node's recent evidence, which may
        prove that it samples with finer rounding than the class.
        """
        known = self._honest(numerics, without)
        finest = _draws_shown(shown, self._measured.get(numerics.rounding, NO_EVIDENCE))
        return known if finest is None else replace(known, draws=min(known.draws, finest))

    def _honest(self, numerics: NumericsClass, without: Evidence) -> Honest:
        measured = self._measured.get(numerics.rounding)
        least = default(numerics, self._temperature)
        if measured is not None:
            draws, claims = _most_likely(measured)
            claims = _rounded_up(claims)
            low, high = _shifts(measured, claims)
            least = Honest(draws=_rounded_up(draws), claims=claims, too_low=low, too_high=high)
        shown = self._shown.get(numerics, NO_EVIDENCE) - without
        if shown.num_tokens >= LEAST_TOKENS:
            draws, claims = _most_likely(shown)
            claims = max(least.claims, min(_rounded_up(claims), least.claims + LEARNED))
            low, high = _shifts(shown, claims)
            least = Honest(
                draws=max(least.draws, min(_rounded_up(draws), least.draws + LEARNED)),
                claims=claims,
                tolerance=least.tolerance,
                too_low=max(least.too_low, min(low, least.too_low + 1)),
                too_high=max(least.too_high, min(high, least.too_high + 1)),
            )
        agreed = self._class_wide.get(numerics)
        if agreed is None:
            return least
        return replace(least, draws=max(least.draws, agreed.draws), claims=max(least.claims, agreed.claims))

    def class_wide(self, numerics: NumericsClass, shown: Sequence[Evidence]) -> tuple[int, ...]:
        """Set the class's rounding scale if several nodes without a common owner agree on it.

        `shown`: recent evidence of nodes of the class without a common owner, the accused node first. Return the
        indices of the nodes that round as coarsely as the accused node. Return an empty tuple if these are fewer than
        `UNLIKE_NODES`, or fewer than half of all, or if forged tokens explain the evidence of one of them better than
        coarser rounding does.
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
        """Return the numerics classes (kinds of engine) whose rounding scales were set by several nodes without a
        common owner (`class_wide`)."""
        return tuple(
            CoarseClass(numerics, float(SCALES[agreed.draws]), float(SCALES[agreed.claims]))
            for numerics, agreed in self._class_wide.items()
        )

    def restore(self, classes: Iterable[CoarseClass]) -> None:
        """Restore the classes that `coarser_than_measured` returned before the hub's restart."""
        for numerics, draws, claims in classes:
            agreed = Honest(draws=at_least(draws), claims=at_least(claims))
            self._class_wide[self.known(numerics)] = agreed


def _most_likely(shown: Evidence) -> tuple[int, int]:
    """Return the most likely rounding scales of draws and of claims, as indices into `SCALES`.

    The scale of draws is at least that of claims minus `BOTH_EDGES`: a claim errs by the rounding of both edges of the
    interval of cumulative probability that draws the token. Draws may suggest a smaller scale than the true one,
    because few random numbers fall outside this interval.
    """
    claims = int(np.argmax(shown.claims_CS[0]))
    return max(int(np.argmax(shown.draws_CS[0])), claims - BOTH_EDGES), claims


def _shifts(shown: Evidence, claims: int) -> tuple[int, int]:
    """Return the shifts of these claims downwards and upwards, in steps of `likelihood.SHIFT`: the smallest numbers for
    which one step more is less likely. `claims`: index of the claims' rounding scale."""
    of_shifts_2K = shown.claims_CS[DRAW_CURVES:, claims].reshape(2, SHIFTS)
    low, high = (
        int(np.argmax(of_shifts_K < 0.0)) if (of_shifts_K < 0.0).any() else SHIFTS - 1 for of_shifts_K in of_shifts_2K
    )
    return low, high


def _draws_shown(shown: Evidence, measured: Evidence) -> int | None:
    """Return the finer rounding scale of draws that a node's fine claims prove, as an index into `SCALES`; None: they
    prove none.

    The proof is that far fewer claims than measured for the class exceed one of the limits `CLAIM_EDGES`. This limit is
    then the scale. It is a generous scale: claims err by the rounding of both edges of a token's interval of cumulative
    probability, and mostly by far less than the limit.
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
    """Return True if a share of forged tokens at the old scale explains the evidence better than honest ones at the new
    scale.

    Also return True if draws are much coarser than claims, which no engine's are.
    """
    draws_CS, claims_CS = shown.draws_CS, shown.claims_CS
    draws, claims = _most_likely(shown)
    if draws_CS[0, agreed.draws] <= 0.0 or draws > claims + MOST_APART:
        return True
    forged_draws = (draws_CS[1:] + draws_CS[0])[:, before.draws].max()
    forged_claims = (claims_CS[1:4] + claims_CS[0])[:, before.claims].max()
    return bool(forged_draws > draws_CS[0, agreed.draws] or forged_claims > claims_CS[0, agreed.claims])
