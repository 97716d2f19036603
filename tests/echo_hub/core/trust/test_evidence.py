from __future__ import annotations

import numpy as np
import pytest

from echo_hub.core.trust.evidence import NO_EVIDENCE, Evidence, log_odds
from echo_hub.core.trust.likelihood import SCALES, claim_curves, draw_curves, edge_curves, greedy_curves
from tests.echo_hub.core.trust.simulated import HALF, evidence, greedy, tokens


def place(odds: float) -> float:
    """Return the uniform number u whose log-odds, in nats, are `odds`."""
    return float(1.0 / (1.0 + np.exp(-odds)))


def assert_same(one: Evidence, other: Evidence) -> None:
    assert (one.draws, one.claims) == (other.draws, other.claims)
    np.testing.assert_allclose([one.mismatch_kl, one.bias], [other.mismatch_kl, other.bias], atol=1e-9)
    np.testing.assert_allclose(one.draws_CS, other.draws_CS, atol=1e-7)
    np.testing.assert_allclose(one.claims_CS, other.claims_CS, atol=1e-7)


def test_draws_are_counted_by_how_far_outside_they_are() -> None:
    """Each token is drawn if the random number u is in [0, .5). A u beyond the edge .5 (log-odds 0) counts by its
    distance from the edge, in nats of log-odds.
    """
    uniforms = [0.1, *(place(nats) for nats in (0.0005, 0.03, 0.1, 0.4, 0.9, 1.5))]
    found = Evidence.of([0.0] * 7, [HALF] * 7, uniforms, [HALF] * 7)
    assert found.draws == (2, 1, 1, 1, 1, 1)
    assert found.claims == (7, 0, 0, 0, 0, 0)


def test_claims_are_counted_by_how_far_off_they_are() -> None:
    found = [evidence(1, error=error).claims for error in (0.005, -0.03, 0.1, -0.4, 0.9, -1.5)]
    assert found == [tuple(int(place == number) for place in range(6)) for number in range(6)]


def test_an_edge_belongs_to_the_class_below_it() -> None:
    assert Evidence.of_differences([0.01, -0.05, 1.0, 1.0001]).claims == (1, 1, 0, 0, 1, 1)


def test_the_curves_are_sums_over_tokens() -> None:
    below, logprobs, uniforms = np.array([0.0, 0.2]), np.log([0.5, 0.3]), np.array([0.7, 0.3])
    claims = np.log([0.6, 0.3])
    found = Evidence.of(below, logprobs, uniforms, claims)
    np.testing.assert_allclose(found.draws_CS, draw_curves(below, logprobs, uniforms).sum(axis=-1))
    np.testing.assert_allclose(found.claims_CS, claim_curves(log_odds(logprobs) - log_odds(claims)).sum(axis=-1))
    np.testing.assert_allclose(found.edges_CS, edge_curves(below, logprobs, uniforms).sum(axis=-1))


@pytest.mark.parametrize("warmth", [0.2, 1.5])
def test_the_scale_of_an_engine_is_read_at_any_temperature(warmth: float) -> None:
    """At another temperature, the same engine rounds log-odds by 1 / warmth of its rounding at the run's temperature
    (warmth: the draw's temperature divided by the run's). Its evidence must have the same scale, and forged draws must
    stand out as clearly.
    """
    rng = np.random.default_rng(4)
    odds, u = rng.normal(size=4_000) / warmth, rng.random(4_000)
    noise = 0.2 / warmth * rng.standard_t(4, size=(2, len(odds)))
    edge, moved = 1.0 / (1.0 + np.exp(-odds)), 1.0 / (1.0 + np.exp(-odds - noise))
    is_first = u < moved[0]
    below, logprobs = np.where(is_first, 0.0, edge), np.log(np.where(is_first, edge, 1.0 - edge))
    claims = np.log(np.where(is_first, moved[0], 1.0 - moved[0]))
    (found,) = Evidence.of_spans(below, logprobs, u, claims, [len(u)], warmth_N=np.full(len(u), warmth))
    assert SCALES[found.draws_CS[0].argmax()] == pytest.approx(0.2, rel=0.5)
    assert SCALES[found.claims_CS[0].argmax()] == pytest.approx(0.2, rel=0.5)
    (forged,) = Evidence.of_spans(
        below, logprobs, rng.random(len(u)), claims, [len(u)], warmth_N=np.full(len(u), warmth)
    )
    scale = found.draws_CS[0].argmax()
    assert forged.draws_CS[1, scale] > 100.0 > 0.0 > found.draws_CS[1, scale]


def test_warmth_differs_between_spans() -> None:
    arguments = (np.array([0.0, 0.2]), np.log([0.5, 0.3]), np.array([0.7, 0.3]), np.log([0.6, 0.3]))
    both = Evidence.of_spans(*arguments, [1, 1], warmth_N=np.array([1.0, 0.5]))
    alone = [
        Evidence.of_spans(*(each[[place]] for each in arguments), [1], warmth_N=np.array([warmth]))[0]
        for place, warmth in enumerate((1.0, 0.5))
    ]
    for one, other in zip(both, alone, strict=True):
        assert_same(one, other)
    assert_same(alone[0], Evidence.of(*(each[[0]] for each in arguments)))


def test_weights_scale_the_curves_and_not_the_counts() -> None:
    arguments = (np.array([0.0, 0.2]), np.log([0.5, 0.3]), np.array([0.7, 0.3]), np.log([0.6, 0.3]))
    weights = {"draw_weights_N": np.array([0.25, 1.0]), "claim_weights_N": np.array([0.5, 1.0])}
    (found,) = Evidence.of_spans(*arguments, [2], **weights)
    first, second = (Evidence.of(*(each[[place]] for each in arguments)) for place in range(2))
    np.testing.assert_allclose(found.draws_CS, 0.25 * first.draws_CS + second.draws_CS)
    np.testing.assert_allclose(found.claims_CS, 0.5 * first.claims_CS + second.claims_CS)
    np.testing.assert_allclose(found.edges_CS, 0.25 * first.edges_CS + second.edges_CS)
    assert (found.num_tokens, found.num_claims) == (2, 2)


def test_certain_tokens_claimed_as_certain_show_no_rounding() -> None:
    """Certain tokens fit any rounding. If nine of ten tokens are certain, the engine's scale must still be read from
    the tenth.
    """
    odds = np.tile([0.5, *[9.0] * 9], 40)
    noise = 0.2 * np.random.default_rng(4).standard_t(4, len(odds))
    true, claimed = -np.log1p(np.exp(-odds)), -np.log1p(np.exp(-(odds + noise)))
    found = Evidence.of(np.zeros(len(odds)), true, np.zeros(len(odds)), claimed)
    assert SCALES[found.claims_CS[0].argmax()] == pytest.approx(0.2, rel=0.5)
    assert 40 <= found.num_claims < 50 and found.num_tokens == 400


def test_a_certain_token_that_is_claimed_to_be_unlikely_is_invented() -> None:
    assert (Evidence.of([0.0], [-1e-6], [0.5], [-10.0]).claims_CS[1:4, 4] > 0).all()


def test_consecutive_spans_are_separated() -> None:
    found = tokens(np.random.default_rng(1), 10, 0.1)
    starts = (0, 3, 4, 10)
    for one, start, stop in zip(Evidence.of_spans(*found, [3, 1, 6]), starts, starts[1:], strict=False):
        assert_same(one, Evidence.of(*(values[start:stop] for values in found)))


@pytest.mark.parametrize("counts", [[2, 0, 1], [0, 3], [3, 0], [0, 0, 3]])
def test_an_empty_span_shows_nothing(counts: list[int]) -> None:
    found = tokens(np.random.default_rng(2), 3, 0.1)
    shown = Evidence.of_spans(*found, counts)
    for one, count in zip(shown, counts, strict=True):
        assert one.num_tokens == count and (count or one == NO_EVIDENCE)
    assert_same(sum(shown, NO_EVIDENCE), Evidence.of(*found))


def test_no_tokens_are_no_evidence() -> None:
    assert Evidence.of([], [], [], []) == NO_EVIDENCE == evidence()
    assert Evidence.of_differences([]) == NO_EVIDENCE and NO_EVIDENCE.num_tokens == 0


def test_greedy_choices_show_their_shortfall_and_no_claim() -> None:
    """Greedy choices are judged by their shortfall, in nats, from the most likely token. Their claims, for a
    temperature near 0, show nothing.
    """
    found = greedy([0.0, 0.3, 2.0])
    assert (found.draws, found.claims) == ((1, 0, 0, 1, 0, 1), (0,) * 6)
    assert (found.num_tokens, found.num_claims, found.mismatch_kl, found.bias) == (3, 0, 0.0, 0.0)
    np.testing.assert_allclose(found.draws_CS, greedy_curves(np.array([0.0, 0.3, 2.0])).sum(axis=-1))
    assert not found.claims_CS.any()


def test_greedy_and_sampled_tokens_can_be_mixed() -> None:
    drawn = tokens(np.random.default_rng(3), 4, 0.1)
    below, logprobs, uniforms, claims = (np.insert(values, 2, [0.3, 0.0]) for values in drawn)
    is_greedy = np.array([False, False, True, True, False, False])
    first, chosen, last = Evidence.of_spans(below, logprobs, uniforms, claims, [2, 2, 2], greedy_N=is_greedy)
    assert_same(first + last, Evidence.of(*drawn))
    assert_same(chosen, greedy([0.3, 0.0]))


def test_evidence_adds_up_and_can_be_taken_away_again() -> None:
    one, other = evidence(3, forged=1), evidence(2, error=0.3)
    assert (one + other).draws == (5, 0, 0, 0, 0, 1) and (one + other).claims == (4, 0, 0, 2, 0, 0)
    assert_same((one + other) - other, one)
    assert one + NO_EVIDENCE == one


def test_few_large_errors_weigh_no_more_than_the_cut() -> None:
    """`bias` is the sum of the errors, each cut to at most .5 nats either way: .02 - .05 + .5 - .5 = -.03."""
    assert Evidence.of_differences([0.02, -0.05, 3.0, -7.0]).bias == pytest.approx(-0.03)


def test_the_divergence_is_the_k3_estimate() -> None:
    """Schulman's k3 for a token of 50 % that is claimed as 25 %: r - 1 - ln r = 2 - 1 - ln 2, with r = .5 / .25."""
    found = Evidence.of([0.0], [HALF], [0.1], [np.log(0.25)])
    assert found.mismatch_kl == pytest.approx(1.0 - np.log(2.0))


def test_differences_alone_are_claims_alone() -> None:
    found = Evidence.of_differences([0.3, -0.1])
    assert (found.num_tokens, found.num_claims) == (0, 2)
    np.testing.assert_allclose(found.claims_CS, claim_curves(np.array([0.3, -0.1])).sum(axis=-1))
    assert not found.draws_CS.any()


def test_log_odds() -> None:
    """ln(.5 / .5) = 0 and ln(.9 / .1) = 2.1972. Probabilities above .999, even above 1, count as .999."""
    logprobs = np.log([0.5, 0.9, 0.999, 0.9999, 1.0, 1.5])
    assert log_odds(logprobs) == pytest.approx([0.0, 2.1972, 6.9068, 6.9068, 6.9068, 6.9068], abs=1e-4)
    assert log_odds(np.array([-np.inf, -30.0])) == pytest.approx([-np.inf, -30.0])
    assert log_odds(np.array([-0.5], np.float32)).dtype == np.float64


def test_another_temperature_multiplies_them() -> None:
    """At temperature 0.7, a token of 90 % gets much larger log-odds (1.24 nats), but hardly a larger log-probability
    (0.07 nats): only log-odds scale with the temperature.
    """
    policy = np.array([0.9, 0.05, 0.05])
    sharper = policy ** (1 / 0.7) / (policy ** (1 / 0.7)).sum()
    assert np.log(sharper[0] / policy[0]) == pytest.approx(0.0737, abs=1e-4)
    ((moved,),) = np.diff([log_odds(np.log(one[:1])) for one in (policy, sharper)], axis=0)
    assert moved == pytest.approx(np.log(18) / 0.7 - np.log(18))
