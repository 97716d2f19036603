"""Contradiction between two checkers' findings on one rollout, computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from echo_hub.core.trust.evidence import Evidence, log_odds
from echo_hub.core.trust.judging import alarm
from echo_hub.core.trust.likelihood import bounded_log_odds
from echo_hub.core.trust.numerics import DEFAULTS, NumericsClass, default
from echo_hub.core.trust.pairs import FLOOR, PeerFinding, apart, contradiction
from echo_shared.sampling import draws
from tests.echo_hub.core.trust.simulated import logits

F32 = default(NumericsClass("torch", "f32", "cpu"))


def finding(below: list[float], logprobs: list[float]) -> PeerFinding:
    return PeerFinding(spans=(), below=np.array(below), logprobs=np.array(logprobs), num_tokens=9)


def weight(one: PeerFinding, other: PeerFinding, first: str, second: str) -> float:
    """Return how strongly two checkers' findings contradict each other, in nats; `first` and `second` are the checkers'
    precisions.
    """
    honest = DEFAULTS[first].together(DEFAULTS[second])
    return contradiction(one, other, honest)


def test_two_findings_differ_by_two_claims_a_token() -> None:
    """Two nodes' findings are compared in log-odds, with two differences for each token: of the cumulative probability
    at which the token begins (.3 and .4 differ by .4408) and of the token's probability (50 and 60 % differ by .4055).
    """
    found = apart(finding([0.3], [np.log(0.5)]), finding([0.4], [np.log(0.6)]))
    assert (found.num_tokens, found.num_claims) == (0, 2)
    edges = float(bounded_log_odds(np.array(0.3)) - bounded_log_odds(np.array(0.4)))
    likely = float(np.subtract(*log_odds(np.log([0.5, 0.6]))))
    assert (edges, likely) == pytest.approx((-0.4408, -0.4055), abs=1e-4)
    expected = Evidence.of_differences([edges, likely])
    assert found.claims == expected.claims == (0, 0, 0, 2, 0, 0)
    np.testing.assert_allclose(found.claims_CS, expected.claims_CS)


def test_equal_findings_have_no_distance() -> None:
    one = finding([0.0, 0.5, 1.0], [-0.5, -700.0, 0.0])
    assert apart(one, one).claims == (6, 0, 0, 0, 0, 0)
    assert weight(one, one, "f32", "f32") <= 0.0


@pytest.mark.parametrize(("first", "second"), [("f32", "f32"), ("bf16", "q8_0"), ("f32", "q4_k_m")])
def test_an_invented_finding_contradicts_an_honest_one(first: str, second: str) -> None:
    """Checkers that compute nothing must invent their values. Here one calls each of 40 tokens nine nats less likely
    than the honest checker does.
    """
    honest, liar = finding([0.2] * 40, [-0.5] * 40), finding([0.7] * 40, [-9.5] * 40)
    assert weight(honest, liar, first, second) > alarm(1e-6)


@pytest.mark.parametrize(
    ("first", "second", "noise"), [("f32", "f32", 0.004), ("bf16", "f32", 0.04), ("q8_0", "bf16", 0.1)]
)
def test_findings_of_two_honest_engines_agree(first: str, second: str, noise: float) -> None:
    rng = np.random.default_rng(3)
    true, one = logits(rng, 2_000, noise)
    other = true + noise / 4 * rng.normal(size=true.shape)
    ids, _ = draws.draw(true, rng.random(2_000), 1.0)
    found = [draws.interval(own, ids, 1.0) for own in (one, other)]
    for start in range(0, 2_000, 20):
        part = slice(start, start + 20)
        pair = [finding(below[part].tolist(), logprobs[part].tolist()) for below, logprobs in found]
        assert weight(pair[0], pair[1], first, second) < alarm(1e-6)


def test_how_unlikely_an_undrawn_token_is_does_not_matter() -> None:
    assert apart(finding([0.5], [-19.5]), finding([0.5], [-1e4])).claims == (2, 0, 0, 0, 0, 0)
    assert apart(finding([0.5], [FLOOR]), finding([0.5], [-0.5])).claims == (1, 0, 0, 0, 0, 1)


def test_two_engines_are_as_coarse_as_both_together() -> None:
    """Rounding scales of two engines add up: 0.0055 + 0.0055 = 0.011. Scales are a factor sqrt(2) apart, so twice the
    scale is two steps up.
    """
    both = F32.together(F32)
    assert (both.draws, both.claims) == (F32.draws + 2, F32.claims + 2)
