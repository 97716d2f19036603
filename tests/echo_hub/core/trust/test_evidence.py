from __future__ import annotations

import numpy as np
import pytest

from echo_hub.core.trust.evidence import NO_EVIDENCE, Evidence, log_odds


def test_an_edge_belongs_to_the_class_below_it() -> None:
    evidence = Evidence.of([0.0, 1e-3, 0.0011, 1.0, 1.1], [0.0, -0.001, 0.5, -1.0, -7.0])
    assert evidence.draws == (2, 1, 0, 0, 1, 1)
    assert evidence.claims == (2, 0, 0, 1, 1, 1)
    assert evidence.num_tokens == 5


def test_evidence_adds_up_and_can_be_taken_away_again() -> None:
    one, other = Evidence.of([0.0], [0.3], 0.5), Evidence.of([3.0, 0.0], [0.0, 0.0], 0.25)
    assert (one + other).draws == (2, 0, 0, 0, 0, 1) and (one + other).mismatch_kl == 0.75
    assert (one + other) - other == one
    assert one + NO_EVIDENCE == one


def test_few_large_errors_weigh_no_more_than_the_cut() -> None:
    """By hand: errors of 0.02, -0.05 and two beyond 0.5: 0.02 - 0.05 + 0.5 - 0.5, and 4e-4 + 25e-4 + 2 * 0.25."""
    evidence = Evidence.of([0.0] * 4, [0.02, -0.05, 3.0, -7.0])
    assert evidence.bias == pytest.approx(-0.03)
    assert evidence.squares == pytest.approx(0.5029)
    assert (evidence + evidence).squares == pytest.approx(1.0058)
    assert (evidence + evidence - evidence).squares == pytest.approx(0.5029)


def test_log_odds() -> None:
    """By hand: ln(.5 / .5), ln(.9 / .1); beyond .999 all are ln(.999 / .001), also what is more than certain."""
    logprobs = np.log([0.5, 0.9, 0.999, 0.9999, 1.0, 1.5])
    assert log_odds(logprobs) == pytest.approx([0.0, 2.1972, 6.9068, 6.9068, 6.9068, 6.9068], abs=1e-4)
    assert log_odds(np.array([-np.inf, -30.0])) == pytest.approx([-np.inf, -30.0])
    assert log_odds(np.array([-0.5], np.float32)).dtype == np.float64


def test_another_temperature_multiplies_them() -> None:
    """Of 90 %, whose two rivals share the rest, at 0.7: they move by 1.24 nats, its log-probability by 0.07."""
    policy = np.array([0.9, 0.05, 0.05])
    sharper = policy ** (1 / 0.7) / (policy ** (1 / 0.7)).sum()
    assert np.log(sharper[0] / policy[0]) == pytest.approx(0.0737, abs=1e-4)
    ((moved,),) = np.diff([log_odds(np.log(one[:1])) for one in (policy, sharper)], axis=0)
    assert moved == pytest.approx(np.log(18) / 0.7 - np.log(18))
