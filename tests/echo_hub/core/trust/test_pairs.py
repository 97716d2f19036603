"""How far two honest engines may lie apart, by hand; and how far two findings do."""

from __future__ import annotations

import numpy as np
import pytest

from echo_hub.core.trust.evidence import CLAIM_EDGES, DRAW_EDGES, PROBABILITY_EDGES
from echo_hub.core.trust.judging import alarm, weigh
from echo_hub.core.trust.numerics import LEAST, PRIORS, Honest, NumericsClass, Shares, prior
from echo_hub.core.trust.pairs import FLOOR, Finding, apart, between, together

NEVER: Shares = (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
HALF: Shares = (0.5, 0.1, 0.1, 0.1, 0.1, 0.1)
FEW: Shares = (0.9985, 0.001, 0.0003, 1e-4, 5e-5, 5e-5)
EXACT = Honest(draws=NEVER, misses=NEVER, claims=NEVER)
TENTHS = Honest(draws=HALF, misses=HALF, claims=HALF, dispersion=1.5)
F32 = Honest(draws=FEW, misses=FEW, claims=(0.975, 0.02, 0.0036, 0.001, 0.0003, 0.0001))


def finding(outside: list[float], logprobs: list[float]) -> Finding:
    return Finding(spans=(), outside=np.array(outside), logprobs=np.array(logprobs), num_tokens=9)


def test_by_hand() -> None:
    """Beyond 0.2 lies one float32 token in 20,000, beyond 0.05 one in 10,000; so beyond 0.1, halfway between these, one
    in 14,142: of two engines twice as many lie more than 0.2 apart. Nothing is known below the first edge."""
    found = between(F32, F32)
    assert found.draws[5] == pytest.approx(2 / 14_142, rel=1e-4)
    assert sum(found.draws[1:]) == pytest.approx(2 * 2 * 0.0015)
    assert sum(found.draws) == pytest.approx(1.0) and sum(found.claims) == pytest.approx(1.0)


def test_the_coarser_decides_and_no_share_is_nought() -> None:
    found = together(TENTHS, EXACT)
    assert found.dispersion == 1.5
    assert sum(found.draws[1:]) == pytest.approx(0.99), "twice a half is more than there is"
    assert min(together(TENTHS, TENTHS).draws) >= LEAST and min(together(TENTHS, TENTHS).claims) >= LEAST


@pytest.mark.parametrize("one", sorted(PRIORS))
@pytest.mark.parametrize("other", sorted(PRIORS))
def test_two_are_never_nearer_than_one_to_the_truth(one: str, other: str) -> None:
    first, second = (prior(NumericsClass("torch", precision)) for precision in (one, other))
    found = together(first, second)
    assert found == together(second, first)
    for edges, both, alone in (
        (DRAW_EDGES, found.draws, first.draws),
        (PROBABILITY_EDGES, between(first, second).draws, first.misses),
        (CLAIM_EDGES, found.claims, first.claims),
    ):
        for place in range(1, len(edges) + 1):
            assert sum(both[place:]) >= min(sum(alone[place:]), 0.9)


def test_findings_that_differ_by_invention_do_not_go_together() -> None:
    """Three tokens of eight are said to lie elsewhere: 3 · ln(0.8 + 0.2 · 0.58 / 0.000141) - 5 · 0.22 nats."""
    honest = finding([0.0] * 8, [-0.5] * 8)
    liar = finding([0.0] * 5 + [0.4] * 3, [-0.5] * 8)
    weight = max(weigh(apart(honest, liar), between(F32, F32)))
    assert weight == pytest.approx(3 * np.log(0.8 + 0.2 * 0.58 / (2 / 14_142)) + 5 * np.log(0.8), rel=1e-3)
    assert weight > alarm(1e-6)
    assert max(weigh(apart(honest, finding([1e-5] * 8, [-0.5002] * 8)), between(F32, F32))) <= 0


def test_how_unlikely_a_token_is_that_nobody_draws_is_no_matter() -> None:
    assert apart(finding([0.5], [-19.5]), finding([0.5], [-1e4])).claims[0] == 1
    assert apart(finding([0.5], [FLOOR]), finding([0.5], [-0.5])).claims[-1] == 1
