"""What two nodes' numerics allow them to differ by: how far two honest engines lie apart, token by token.

Where a node checks another, neither is the truth. Both are off by what honest engines of their classes show against it
(`numerics`), and two that are off by a and b lie no further apart than a + b. So, however the two depend on each other,

    P(apart > e)  <=  P(a > e / 2) + P(b > e / 2)

of which the right side follows from the priors, read between their edges on logarithmic scales. Nothing is learned
here: what a class showed against another is no measure of what it shows against a third.

    two float32 engines, cumulative probability: 1.4 tokens in 10,000 lie more than 0.2 apart, where one has 0.5 against
    the truth
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.trust.evidence import CLAIM_EDGES, DRAW_EDGES, PROBABILITY_EDGES, Evidence, log_odds
from echo_hub.core.trust.numerics import LEAST, Honest, Shares

FLOOR: Final = -7.0
"""Nats. Of tokens that both find less likely than this, neither need know how unlikely they are: where nobody would
have drawn a token, the logarithms of honest engines lie far apart."""
_MOST: Final = 0.99


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finding:
    """What one node has found of a rollout that others drew."""

    spans: tuple[tuple[str, Evidence], ...]
    """What it shows of each node that drew a part, in order."""
    outside: NDArray[np.float64]
    """[T], how far each u lies outside its token's interval, in cumulative probability."""
    logprobs: NDArray[np.float64]
    """[T], nats."""
    num_tokens: int
    """That it was fed, the prompt's too."""


def together(drew: Honest, found: Honest) -> Honest:
    """How tokens that one honest engine drew fall by what another finds of them."""
    return Honest(
        draws=_apart(drew.draws, found.draws, DRAW_EDGES),
        misses=_apart(drew.misses, found.misses, PROBABILITY_EDGES),
        claims=_apart(drew.claims, found.claims, CLAIM_EDGES),
        dispersion=max(drew.dispersion, found.dispersion),
        claims_dispersion=max(drew.claims_dispersion, found.claims_dispersion),
    )


def between(one: Honest, other: Honest) -> Honest:
    """How tokens fall by how far the findings of two honest engines lie apart."""
    both = together(one, other)
    return replace(both, draws=both.misses)


def apart(one: Finding, other: Finding) -> Evidence:
    """How far two findings of one rollout lie apart, as evidence against either: see `between`."""
    claims = (log_odds(np.maximum(finding.logprobs, FLOOR)) for finding in (one, other))
    return Evidence.of(np.abs(one.outside - other.outside), np.subtract(*claims), edges=PROBABILITY_EDGES)


def _apart(one: Shares, other: Shares, edges: tuple[float, ...]) -> Shares:
    tails = [min(_MOST, a + b) for a, b in zip(_beyond_half(one, edges), _beyond_half(other, edges), strict=True)]
    return (1.0 - tails[0], *(max(LEAST, more - less) for more, less in pairwise(tails)), max(LEAST, tails[-1]))


def _beyond_half(shares: Shares, edges: tuple[float, ...]) -> list[float]:
    """The share beyond half of each edge. Below the first edge nothing is known: it is taken to double."""
    tails = [sum(shares[place:]) for place in range(1, len(shares))]
    found = [2 * tails[0]]
    for (near, far), (more, less) in zip(pairwise(edges), pairwise(tails), strict=True):
        place = np.log(far / 2 / near) / np.log(far / near)
        found.append(float(more ** (1 - place) * less**place))
    return found
