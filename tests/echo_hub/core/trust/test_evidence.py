from __future__ import annotations

import pytest

from echo_hub.core.trust.evidence import NO_EVIDENCE, Evidence


def test_an_edge_belongs_to_the_class_below_it() -> None:
    evidence = Evidence.of([0.0, 1e-4, 0.00011, 0.2, 0.21], [0.0, -0.001, 0.5, -1.0, -7.0])
    assert evidence.draws == (2, 1, 0, 0, 1, 1)
    assert evidence.claims == (2, 0, 0, 0, 2, 1)
    assert evidence.num_tokens == 5


def test_evidence_adds_up_and_can_be_taken_away_again() -> None:
    one, other = Evidence.of([0.0], [0.3], 0.5), Evidence.of([0.3, 0.0], [0.0, 0.0], 0.25)
    assert (one + other).draws == (2, 0, 0, 0, 0, 1) and (one + other).mismatch_kl == 0.75
    assert (one + other) - other == one
    assert one + NO_EVIDENCE == one


def test_few_large_errors_weigh_no_more_than_the_cut() -> None:
    """By hand: errors of 0.02, -0.05 and two beyond 0.1: 0.02 - 0.05 + 0.1 - 0.1, and 4e-4 + 25e-4 + 2 * 0.01."""
    evidence = Evidence.of([0.0] * 4, [0.02, -0.05, 3.0, -7.0])
    assert evidence.bias == pytest.approx(-0.03)
    assert evidence.squares == pytest.approx(0.0229)
    assert (evidence + evidence).squares == pytest.approx(0.0458)
    assert (evidence + evidence - evidence).squares == pytest.approx(0.0229)
