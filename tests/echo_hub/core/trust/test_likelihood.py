"""Probability densities of draws (uniforms behind sampled tokens) and claims (reported log-probabilities), against
closed formulas and integrals; noise scales must be recovered from simulated noise.
"""

from __future__ import annotations

from itertools import pairwise
from math import log, sqrt

import numpy as np
import pytest

from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.likelihood import (
    CLAIM_CURVES,
    DRAW_CURVES,
    EDGE_CURVES,
    INVENTED,
    LEAST_WIDTH,
    MOST_APART,
    NEAR,
    NUM_SCALES,
    OUTLIERS,
    SCALES,
    SHIFT,
    SHIFTS,
    TAIL,
    WEIGHTS,
    _beyond,
    _density,
    at_least,
    bounded_log_odds,
    claim_curves,
    draw_curves,
    edge_curves,
    greedy_curves,
)
from echo_shared.sampling import draws
from tests.echo_hub.core.trust.simulated import HALF, VOCABULARY

U = (np.arange(4_000) + 0.5) / 4_000
"""Evenly spaced numbers u in 0 .. 1, over which densities are integrated."""
EDGES = np.array([0.0, 0.001, 0.05, 0.3, 0.35, 0.7, 0.95, 0.999, 1.0])
"""Cumulative probabilities of all tokens of one distribution: likely and unlikely tokens, at both ends and in the
middle.
"""
CLAIMS = np.sinh(np.linspace(-np.arcsinh(MOST_APART * 1e3), np.arcsinh(MOST_APART * 1e3), 20_001)) / 1e3
"""Grid of claim errors in nats, denser near 0, over which densities are integrated."""
TOO_LOW, TOO_HIGH = DRAW_CURVES, DRAW_CURVES + SHIFTS
"""First rows of the claim curves for claims all too low, and all too high."""


def of_all_tokens() -> list[tuple[float, np.ndarray]]:
    """Return (probability, draw curves [classes, scales, uniforms]) of each token between `EDGES`."""
    return [
        (high - low, draw_curves(np.full(len(U), low), np.full(len(U), log(high - low)), U))
        for low, high in pairwise(EDGES)
    ]


@pytest.mark.parametrize(
    ("x", "tail"),
    [(0.0, 0.5), (1.0, 0.18695048315), (2.7764451052, 0.025), (4.6040948713, 0.005), (8.6103015814, 0.0005)],
)
def test_tails_of_student_t_equal_the_tables(x: float, tail: float) -> None:
    """For four degrees of freedom, the tail beyond 1 is 1/2 - 7 / (10 sqrt(5)) = .18695; the others are tabulated
    quantiles.
    """
    assert _beyond(np.array([x, -x])) == pytest.approx([tail, tail], rel=1e-8)


def test_far_tails_keep_their_digits() -> None:
    """The probability of Student's t beyond a large x is about 3 / x**4, too small for a computation as 1 minus the
    rest.
    """
    far = np.array([1e4, 1e6, 1e8, 1e20])
    assert _beyond(far) == pytest.approx(3.0 / far**4, rel=1e-6)


def test_the_density_of_claims_has_two_degrees_of_freedom() -> None:
    """Closed values are t(0) = 1 / sqrt(8) and t(2) = 3**-1.5 / sqrt(8) = .06804. Elsewhere, t is the derivative of 1/2
    + x / (2 sqrt(2 + x**2)).
    """
    assert _density(np.array([0.0, 2.0])) == pytest.approx([0.3535534, 0.0680414], rel=1e-6)
    x = np.array([-10.0, -1.0, 0.3, 3.0])
    below, above = ((x + step) / (2.0 * np.sqrt(2.0 + (x + step) ** 2)) for step in (-1e-5, 1e-5))
    assert _density(x) == pytest.approx((above - below) / 2e-5, rel=1e-6)


def test_both_distributions_are_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    x = np.concatenate([np.linspace(-20.0, 20.0, 81), [1e3, 1e6]])
    np.testing.assert_allclose(_beyond(x), stats.t(4).sf(np.abs(x)), rtol=1e-9)
    np.testing.assert_allclose(_density(x), stats.t(2).pdf(x), rtol=1e-9)


def test_log_odds_are_bounded_by_the_tail() -> None:
    """Given TAIL = .001: ln(1.001 / .001) = 6.9088 at the ends, and ln(.901 / .101) = 2.1884 at .9."""
    end = log((1 + TAIL) / TAIL)
    places = np.array([-1.0, 0.0, 0.5, 0.9, 1.0, 2.0])
    assert bounded_log_odds(places) == pytest.approx([-end, -end, 0.0, 2.188384, end, end], abs=1e-5)


@pytest.mark.parametrize(("below", "width"), [(0.4, 0.1), (0.5, 0.499), (0.0, 1.0), (0.2, 1e-4), (0.0, 0.01)])
def test_the_density_of_one_interval_integrates_to_one(below: float, width: float) -> None:
    """A coarse noise scale moves a part of the density beyond the ends 0 and 1. So the test compares only scales that
    are small compared with the interval's distance from the ends."""
    curves = draw_curves(np.full(len(U), below), np.full(len(U), log(width)), U)
    up_to = at_least(1 / 16) if width > 1e-3 else at_least(1 / 8)
    least = at_least(1 / 64)  # At finer scales the density is narrower than the spacing of `U`.
    assert np.exp(curves[0]).mean(axis=-1)[least : up_to + 1] == pytest.approx(1.0, abs=0.012)


def test_over_all_tokens_the_density_integrates_to_one() -> None:
    """Coarse noise moves mass between tokens, so the sum over all tokens must be 1, less the mass beyond 0 and 1."""
    total_S = sum(width * np.exp(curves[0]).mean(axis=-1) for width, curves in of_all_tokens())
    assert total_S[: at_least(0.25)] == pytest.approx(1.0, abs=2e-3)
    assert (total_S[: at_least(1.0) + 1] > 0.95).all() and (total_S <= 1.0 + 1e-9).all()


@pytest.mark.parametrize("place", range(len(WEIGHTS)))
def test_under_honesty_forged_over_honest_has_mean_one(place: int) -> None:
    """For honest tokens, the mean of 1 - w + w / f is 1 at every scale (f: density of the draw's random number u under
    honesty, w: forged share). This bounds the rate of false alarms.
    """
    mean_S = sum(width * np.exp(curves[0] + curves[1 + place]).mean(axis=-1) for width, curves in of_all_tokens())
    assert mean_S[: at_least(0.25)] == pytest.approx(1.0, abs=2e-3)
    assert (mean_S <= 1.0 + 1e-9).all()


def test_a_draw_by_hand() -> None:
    """The token is drawn if the random number u is in [0, .5), but u = .9; the rounding scale is 1. With L the bounded
    log-odds and T the tail of the noise, the honest density is f = (T(L(.9) - L(0)) - T(L(.9) - L(.5))) / .5, where
    L(.9) = 2.1884.
    """
    place = at_least(1.0)
    mass = float(_beyond(np.array(2.188384)) - _beyond(np.array(2.188384 + log(1001))))
    likely = log((1 - OUTLIERS) * mass / 0.5 + OUTLIERS)
    curves = draw_curves(np.zeros(1), np.full(1, HALF), np.full(1, 0.9))
    expected = [likely, *(log(1 - w + w * np.exp(-likely)) for w in WEIGHTS)]
    assert curves[:, place, 0] == pytest.approx(expected, rel=1e-5)


def test_one_forged_token_weighs_at_most_its_outlier_share() -> None:
    """Single tokens weigh at most ln(1 - w + w / 1e-4): 7.60, 5.30 and 3.04 nats for the three shares w."""
    curves = draw_curves(np.zeros(1), np.full(1, HALF), np.full(1, 0.9999))
    assert curves[1:, 0, 0] == pytest.approx([log(1 - w + w / OUTLIERS) for w in WEIGHTS], rel=1e-6)
    assert curves[1:, 0, 0] == pytest.approx([7.6014, 5.3032, 3.0440], abs=1e-3)


def test_a_narrow_interval_shows_little_at_coarse_scales() -> None:
    """Rounding scales of 2 nats make the density nearly flat: a token of probability 1e-4 weighs about the same for a
    random number u just outside the interval that draws the token and for a u that is a nat away.
    """
    near, off = (
        draw_curves(np.full(1, 0.4), np.full(1, log(1e-4)), np.full(1, u))[0, at_least(2.0), 0] for u in (0.4, 0.64)
    )
    assert abs(near - off) < 0.25


@pytest.mark.parametrize("place", range(len(WEIGHTS)))
def test_the_weight_of_greedy_choices_has_mean_one_at_most(place: int) -> None:
    """The weight is the density under forgery divided by the density under honesty. For an honest node its mean must be
    at most 1, to limit false alarms. Here rounding moves the distance of two logits by Student's t with four degrees of
    freedom."""
    x = np.concatenate([[0.0], np.logspace(-7, 5, 20_000)])
    density_SN = 2.0 * 0.375 * (1.0 + (x / SCALES[:, None]) ** 2 / 4.0) ** -2.5 / SCALES[:, None]
    means = np.trapezoid(density_SN * np.exp(greedy_curves(x)[1 + place]), x, axis=1)
    assert (means <= 1.0 + 1e-6).all() and means == pytest.approx(1.0, abs=1e-3)


def test_a_greedy_choice_by_hand() -> None:
    """If the most likely token was chosen, the honest density is f = 2 (1 - 1e-4) + 1e-4 at every scale."""
    curves = greedy_curves(np.array([0.0, 1.0]))
    assert curves[0, :, 0] == pytest.approx(log(2 - OUTLIERS))
    assert curves[1:, 0, 0] == pytest.approx([log(1 - w + w / (2 - OUTLIERS)) for w in WEIGHTS], rel=1e-9)
    root = sqrt(2.0 * float(_beyond(np.array(4.0))))  # One nat is four times the scale of 1/4.
    ratio = 1.0 / (2.0 * (1 - OUTLIERS) * root + OUTLIERS)
    assert curves[1, at_least(0.25), 1] == pytest.approx(log(0.8 + 0.2 * ratio), rel=1e-9)


def test_the_density_of_claims_integrates_to_one() -> None:
    total_S = np.trapezoid(np.exp(claim_curves(CLAIMS)[0]), CLAIMS, axis=1)
    assert total_S == pytest.approx(1.0, abs=2e-3)


@pytest.mark.parametrize("place", range(len(WEIGHTS)))
def test_invented_over_honest_claims_has_mean_one(place: int) -> None:
    curves = claim_curves(CLAIMS)
    mean_S = np.trapezoid(np.exp(curves[0] + curves[1 + place]), CLAIMS, axis=1)
    assert mean_S == pytest.approx(1.0, abs=2e-3)


@pytest.mark.parametrize(("bias", "rounded_up"), [(0.0, 1.0), (0.0, sqrt(2.0)), (1.0, sqrt(2.0))])
def test_honest_noise_does_not_weigh_as_a_shift(bias: float, rounded_up: float) -> None:
    """Rounding raises honest claims by half of its variance (`bias` 1) or does not change their mean (`bias` 0).
    Neither may count as evidence of shifted claims, whether the class's scale is the true one or a step above.
    """
    curves = claim_curves(CLAIMS)
    for place, scale in enumerate(SCALES / rounded_up):
        honest = _density((CLAIMS + bias * scale**2) / scale) / scale
        means = np.trapezoid(honest * np.exp(curves[[TOO_LOW, TOO_HIGH], place]), CLAIMS, axis=1)
        assert (means <= 1.0 + 2e-3).all(), scale


def test_a_shift_of_honest_claims_weighs_only_for_smaller_shifts() -> None:
    """Claims that are 2 steps too low are evidence for shifts of at most 2 steps, and evidence against larger
    shifts."""
    of_shifts = claim_curves(np.array([2 * SHIFT]))[TOO_LOW:TOO_HIGH, at_least(0.125), 0]
    assert len(of_shifts) == SHIFTS
    assert (of_shifts[:2] > 0.5).all() and (of_shifts[2:] < -0.5).all()


def test_a_claim_by_hand() -> None:
    """Claimed log-probabilities 2 nats off, at rounding scale 1, have density t(2) = .06804 if honest, and t(1) / 2 =
    .19245 / 2 if invented (t: Student's, two degrees of freedom).
    """
    place, invented = at_least(1.0), 0.1924501 / INVENTED
    honest = log((1 - OUTLIERS) * 0.0680414 + OUTLIERS * invented)
    curves = claim_curves(np.array([2.0]))
    assert curves[0, place, 0] == pytest.approx(honest, rel=1e-5)
    assert curves[1, place, 0] == pytest.approx(log(0.8 + 0.2 * invented / np.exp(honest)), rel=1e-5)


def test_claims_that_are_shifted_weigh_for_their_side_alone() -> None:
    place = at_least(0.0625)
    shifts = (SHIFT, -SHIFT - 0.0625**2 / 2)
    too_low, too_high = (claim_curves(np.array([shift]))[[TOO_LOW, TOO_HIGH], place, 0] for shift in shifts)
    assert too_low[0] > 3.0 > 0.0 > too_low[1]
    assert too_high[1] > 3.0 > 0.0 > too_high[0]


@pytest.mark.parametrize("scale", [0.0078125, 0.0442, 0.25, 1.0])
def test_the_scale_of_noisy_draws_is_recovered(scale: float) -> None:
    rng = np.random.default_rng(int(1_000 * scale))
    count = 3_000
    uniforms = rng.random(count)
    odds = np.exp(bounded_log_odds(uniforms) - scale * rng.standard_t(4, count))
    # The inverse of the bounded log-odds L.
    moved = ((odds * (1.0 + TAIL) - TAIL) / (1.0 + odds)).clip(0.0, 1.0 - 1e-12)
    logits = rng.normal(size=(count, VOCABULARY)) * rng.uniform(0.5, 4.0, size=(count, 1))
    ids, _ = draws.draw(logits, moved, 1.0)
    below, logprobs = draws.interval(logits, ids, 1.0)
    found = int(draw_curves(below, logprobs, uniforms)[0].sum(axis=1).argmax())
    assert abs(found - at_least(scale)) <= 1
    claims = int(claim_curves(scale * rng.standard_t(4, count))[0].sum(axis=1).argmax())
    assert abs(claims - at_least(scale)) <= 1


def test_every_token_gives_finite_numbers() -> None:
    """Extreme values must not give NaN or inf: tokens of probability 0, intervals of cumulative probability that are
    too narrow or end beyond 1, and claims out of bounds.
    """
    below = [0.2, 1.0 - 1e-12, 1.0, 0.0, 0.999999, 0.5]
    logprobs = [-np.inf, -30.0, log(0.5), -1e4, 0.0, -0.1]
    uniforms = [0.1, 1.0 - 2.0**-53, 0.0, 0.0, 0.5, 0.75]
    claims = [-100.0, -1e30, 0.0, 3.0, -1e-30, float(np.finfo(np.float32).min)]
    found = Evidence.of(below, logprobs, uniforms, claims)
    assert np.isfinite(found.draws_CS).all() and np.isfinite(found.claims_CS).all()
    assert np.isfinite([found.mismatch_kl, found.bias]).all()
    assert (found.num_tokens, found.num_claims) == (6, 5), "one token is certain, and claimed as certain"


def test_differences_beyond_the_bounds_weigh_as_the_bounds() -> None:
    curves = claim_curves(np.array([MOST_APART, 1e30, np.inf]))
    assert np.isfinite(curves).all() and (curves[..., 1:] == curves[..., :1]).all()
    narrow = draw_curves(np.full(2, 0.3), np.log([LEAST_WIDTH, LEAST_WIDTH / 1e6]), np.full(2, 0.3))
    assert narrow[..., 1] == pytest.approx(narrow[..., 0])


def test_the_arrays_have_their_declared_sizes() -> None:
    assert draw_curves(np.zeros(3), np.zeros(3), np.zeros(3)).shape == (DRAW_CURVES, NUM_SCALES, 3)
    assert greedy_curves(np.zeros(3)).shape == (DRAW_CURVES, NUM_SCALES, 3)
    assert claim_curves(np.zeros(3)).shape == (CLAIM_CURVES, NUM_SCALES, 3)
    assert (SCALES[0], SCALES[-1]) == (2.0**-8, 4.0) and SCALES[1:] / SCALES[:-1] == pytest.approx(sqrt(2.0))


def test_a_scale_is_rounded_up_to_the_next_one() -> None:
    assert [at_least(scale) for scale in (0.0, 2.0**-8, 0.004, 1.0, 1.001, 4.0, 1e9)] == [0, 0, 1, 16, 17, 20, 20]


# --- edges


def edges_of(below: float, width: float, u: np.ndarray) -> np.ndarray:
    """Return two rows [2, N] for the random numbers `u`, at the rounding scale of 1/4 nat. First row: 1 if u is near an
    edge of the token's interval, else 0, minus the probability of being near. Second row: the variance of the first.
    """
    curves = edge_curves(np.full(len(u), below), np.full(len(u), log(width)), u)
    return np.asarray(curves[:, at_least(0.25)])


def test_counts_near_an_edge_equal_hand_computed_ones() -> None:
    """Uniforms within .1875 nats of an edge count as near. For [.3, .7) this is .3 to .3408 and .6592 to .7, a share of
    .204; `TAIL` changes the fourth digit.
    """
    near, variance = edges_of(0.3, 0.4, np.array([0.31, 0.5, 0.69, 0.34, 0.342, 0.2, 0.9]))
    share = 1.0 - near[0]
    assert share == pytest.approx(0.204, abs=1e-3)
    np.testing.assert_allclose(near + share, [1, 0, 1, 1, 0, 1, 1])
    np.testing.assert_allclose(variance, share * (1.0 - share))


@pytest.mark.parametrize(("below", "width"), [(0.3, 0.4), (0.0, 0.6), (0.8, 0.2), (0.45, 0.2), (0.02, 0.9)])
def test_an_exact_engine_is_near_edges_as_often_as_expected(below: float, width: float) -> None:
    u = below + width * (np.arange(100_000) + 0.5) / 100_000
    assert abs(edges_of(below, width, u)[0].mean()) < 1e-4


@pytest.mark.parametrize(("below", "width"), [(0.3, 0.4), (0.0, 0.6), (0.45, 0.3)])
def test_a_rounding_engine_is_near_edges_nearly_as_often(below: float, width: float) -> None:
    """Honest rounding must not look like choosing tokens near edges. The edges here have noise of .18 nats, as in
    engines of the 1/4-nat class.
    """
    rng, count = np.random.default_rng(0), 200_000
    low, high = (
        np.exp(odds) / (1.0 + np.exp(odds))
        for edge in (below, below + width)
        for odds in [np.log((edge + 1e-12) / (1.0 - edge)) + 0.18 * rng.standard_t(4, count)]
    )
    u = rng.random(count)
    near, variance = edges_of(below, width, u[(u >= low) & (u < high)])
    assert -0.1 < near.mean() / variance.mean() < 0.2


def test_the_first_and_last_tokens_have_no_outer_neighbour() -> None:
    assert np.all(edges_of(0.0, 1.0, np.array([0.001, 0.5, 0.999])) == 0.0)
    near, _ = edges_of(0.0, 0.5, np.array([0.001, 0.499]))
    assert near[0] < 0.0 < near[1]


def test_a_narrow_token_is_no_evidence_about_edges() -> None:
    assert np.all(edges_of(0.5, 1e-3, np.array([0.5, 0.5005, 0.9])) == 0.0)


def test_edges_have_a_curve_of_counts_and_one_of_variances() -> None:
    assert edge_curves(np.zeros(3), np.zeros(3), np.zeros(3)).shape == (EDGE_CURVES, NUM_SCALES, 3)
    assert 0.0 < NEAR <= 1.0
