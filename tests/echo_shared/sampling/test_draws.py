"""The rule by which a uniform u selects a token: compared with direct computation, at edges, and by statistics."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_shared.sampling.draws import (
    LEAST_TAIL,
    all_uniforms,
    derive_seed,
    draw,
    interval,
    nats_outside,
    uniforms,
)

SEEDS = st.integers(0, 2**64 - 1)
BELOW_ONE = float(np.nextafter(1.0, 0.0))


def draw_one(logits: list[float], u: float, temperature: float = 1.0) -> tuple[int, float]:
    tokens, logprobs = draw(np.array([logits], np.float32), np.array([u]), temperature)
    return int(tokens[0]), float(logprobs[0])


def distance_of(logits: list[float], token: int, u: float, temperature: float = 1.0) -> tuple[float, float]:
    below, logprobs = interval(np.array([logits], np.float32), np.array([token]), temperature)
    return float(nats_outside(below, logprobs, np.array([u]))[0]), float(logprobs[0])


@given(SEEDS, st.integers(0, 2_000), st.integers(1, 60), st.integers(0, 60))
def test_a_prefix_never_changes(seed: int, index: int, count: int, more: int) -> None:
    assert uniforms(seed, index, count + more)[:count].tolist() == uniforms(seed, index, count).tolist()


@given(st.lists(st.tuples(SEEDS, st.integers(0, 2_000), st.integers(0, 20)), max_size=4))
def test_uniforms_of_several_draws_are_concatenated(drawn: list[tuple[int, int, int]]) -> None:
    assert all_uniforms(drawn).tolist() == [u for each in drawn for u in uniforms(*each).tolist()]


@given(SEEDS, st.integers(0, 1_000))
def test_uniforms_are_in_range(seed: int, index: int) -> None:
    u = uniforms(seed, index, 64)
    assert u.dtype == np.float64 and (u >= 0).all() and (u < 1).all()


def test_uniforms_never_change() -> None:
    assert uniforms(7, 3, 3).tolist() == [0.4821286018761155, 0.7241355726248441, 0.05025403948627161]
    assert derive_seed("echo", 1, 2) == 18_155_612_007_835_688_568


def test_neighbours_share_nothing() -> None:
    rows = [uniforms(seed, index, 32) for seed in range(12) for index in range(12)]
    assert len({value for row in rows for value in row.tolist()}) == 12 * 12 * 32


def test_uniforms_are_uniform() -> None:
    u = np.concatenate([uniforms(seed, 0, 100) for seed in range(1_000)])
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    # Chi-square with 19 degrees of freedom; a true sampler fails with p < 1e-4.
    assert ((counts - 5_000) ** 2 / 5_000).sum() < 50


@given(st.lists(st.one_of(st.integers(0, 2**64 - 1), st.text(max_size=5)), min_size=1, max_size=4))
def test_seeds_depend_on_the_parts_and_where_they_end(parts: list[int | str]) -> None:
    seed = derive_seed(*parts)
    assert 0 <= seed < 2**64
    assert seed == derive_seed(*parts)
    assert seed != derive_seed(*parts, "")
    assert derive_seed("ab", "c") != derive_seed("a", "bc")
    assert derive_seed(1) != derive_seed("1")


def test_the_first_token_with_a_cumulative_probability_above_u_is_drawn() -> None:
    logits = [float(np.log(p)) for p in (0.25, 0.5, 0.25)]
    assert [draw_one(logits, u)[0] for u in (0.0, 0.2, 0.3, 0.7, 0.8, BELOW_ONE)] == [0, 0, 1, 1, 2, 2]


def test_a_tie_goes_to_the_later_token() -> None:
    """The first token whose cumulative probability exceeds u is drawn; a probability equal to u does not exceed it."""
    assert [draw_one([0.0, 0.0], u)[0] for u in (0.5, float(np.nextafter(0.5, 0.0)))] == [1, 0]
    assert [draw_one([0.0] * 4, u)[0] for u in (0.25, 0.5, 0.75)] == [1, 2, 3]


@pytest.mark.parametrize("u", [0.0, 1e-300, 0.5, BELOW_ONE])
def test_a_token_without_probability_is_never_drawn(u: float) -> None:
    nothing = float("-inf")
    assert draw_one([nothing, 1.0, nothing, nothing], u)[0] == 1
    assert draw_one([-1e30, 1.0, -1e30], u)[0] == 1
    assert draw_one([nothing, 0.0, 0.0, nothing], u)[0] in (1, 2)


@settings(max_examples=200)
@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=30), st.floats(0, 1, exclude_max=True))
def test_agrees_with_the_definition(logits: list[float], u: float) -> None:
    token, logprob = draw_one(logits, u, temperature=0.7)
    scaled = np.array(logits, np.float32).astype(np.float64) / 0.7
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    cumulative = np.cumsum(p)
    low = cumulative[token] - p[token]
    assert low - 1e-12 <= u <= cumulative[token] + 1e-12
    assert logprob == pytest.approx(np.log(p[token]), abs=1e-9)


def test_the_distribution_is_the_softmax_at_the_temperature() -> None:
    logits = np.array([1.0, 0.0, -1.0, 2.0], np.float32)
    u = np.concatenate([uniforms(seed, 0, 100) for seed in range(400)])
    tokens, _ = draw(np.tile(logits, (len(u), 1)), u, 2.0)
    expected = np.exp(logits / 2.0) / np.exp(logits / 2.0).sum() * len(u)
    observed = np.bincount(tokens, minlength=4)
    # Chi-square with 3 degrees of freedom; a true sampler fails with p < 1e-4.
    assert ((observed - expected) ** 2 / expected).sum() < 21


def test_rows_are_independent_of_each_other() -> None:
    logits = np.random.default_rng(0).normal(size=(8, 50)).astype(np.float32)
    u = uniforms(1, 0, 8)
    together, logprobs = draw(logits, u, 1.0)
    alone = [draw(logits[i : i + 1], u[i : i + 1], 1.0) for i in range(8)]
    assert together.tolist() == [int(tokens[0]) for tokens, _ in alone]
    assert logprobs.tolist() == [float(lp[0]) for _, lp in alone]


def test_extreme_logits_stay_finite() -> None:
    for logits in ([1e30, -1e30], [3e38, 3e38], [-3e38, -3e38], [88.0, -88.0]):
        _, logprob = draw_one(logits, 0.3)
        assert np.isfinite(logprob) and logprob <= 0


NOTHING = float("-inf")
QUARTERS = [0.0, 0.0, 0.0, 0.0]


def odds(probability: float) -> float:
    """Return the log-odds of the probability, which is clipped to LEAST_TAIL and 1 - LEAST_TAIL."""
    near = min(max(probability, LEAST_TAIL), 1.0 - LEAST_TAIL)
    return float(np.log(near / (1.0 - near)))


FARTHEST = odds(1.0)


@pytest.mark.parametrize(
    ("logits", "token", "u", "expected"),
    [
        # Four ids of probability 1/4. The interval of id 1 reaches from 0.25 to 0.5; the odds of these edges are 1/3
        # and 1. u = 1/8 has the odds 1/7.
        (QUARTERS, 1, 0.375, 0.0),
        (QUARTERS, 1, 0.25, 0.0),
        (QUARTERS, 1, 0.5, 0.0),
        (QUARTERS, 1, 0.125, np.log(7 / 3)),
        (QUARTERS, 1, 0.75, np.log(3)),
        (QUARTERS, 1, 0.0, FARTHEST - np.log(3)),
        (QUARTERS, 0, 0.0, 0.0),
        (QUARTERS, 3, 0.0, FARTHEST + np.log(3)),
        (QUARTERS, 3, BELOW_ONE, 0.0),
        (QUARTERS, 0, 0.75, 2 * np.log(3)),
        (QUARTERS, 0, BELOW_ONE, FARTHEST + np.log(3)),
        # The interval of an id with probability 0 is a point: 0 for id 0, 0.5 for id 1, 1 for the last id.
        ([0.0, NOTHING, 0.0], 1, 0.5, 0.0),
        ([0.0, NOTHING, 0.0], 1, 0.75, np.log(3)),
        ([0.0, NOTHING, 0.0], 1, 0.25, np.log(3)),
        ([NOTHING, 0.0, 0.0], 0, 0.25, FARTHEST - np.log(3)),
        ([0.0, 0.0, NOTHING], 2, 0.25, FARTHEST + np.log(3)),
        # The only possible id has the interval [0, 1].
        ([NOTHING, 1.0, NOTHING], 1, 0.0, 0.0),
        ([NOTHING, 1.0, NOTHING], 1, BELOW_ONE, 0.0),
        ([7.0], 0, 0.5, 0.0),
    ],
)
def test_the_distance_is_how_far_u_lies_outside_the_interval(
    logits: list[float], token: int, u: float, expected: float
) -> None:
    found, _ = distance_of(logits, token, u)
    assert found == pytest.approx(expected, rel=1e-12) and (found == 0.0) == (expected == 0.0)


def test_a_rounding_error_moves_a_distance_equally_at_every_edge() -> None:
    """In log-odds, an error of 0.1 in a logit moves every edge by 0.1. In probability, it moves an edge near one half
    by 0.025, but an edge near 99.7 % by 0.0003.
    """
    for likely in (0.0, 3.0, 6.0):
        exact, rounded = (distance_of([likely + error, 0.0], 1, 0.01)[0] for error in (0.0, 0.1))
        assert rounded - exact == pytest.approx(0.1, abs=1e-6)


def test_distances_within_the_least_tail_count_as_zero() -> None:
    assert distance_of([12.0, 0.0], 0, 1.0 - 1e-6)[0] == 0.0
    assert distance_of([12.0, 0.0], 1, 1.0 - LEAST_TAIL / 2)[0] == 0.0


def test_the_distance_is_taken_at_the_temperature() -> None:
    logits = [float(np.log(p)) for p in (0.25, 0.25, 0.5)]
    cold = np.array([1.0, 1.0, 4.0]) / 6.0  # Temperature 1/2 squares the weights 1 : 1 : 2.
    outside, logprob = distance_of(logits, 2, 0.25, temperature=0.5)
    assert outside == pytest.approx(odds(cold[:2].sum()) - odds(0.25), abs=1e-6)
    assert logprob == pytest.approx(np.log(cold[2]), abs=1e-7)


def test_an_impossible_token_has_no_probability() -> None:
    assert distance_of([0.0, NOTHING], 1, BELOW_ONE)[1] == NOTHING
    assert distance_of([0.0, -1e30], 1, BELOW_ONE)[1] < -1e29


@settings(max_examples=200)
@given(
    st.lists(
        st.one_of(st.floats(-30, 30, width=32), st.sampled_from([0.0, NOTHING, 3e38])), min_size=1, max_size=30
    ).filter(lambda logits: max(logits) > NOTHING),
    st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.25, 0.5, BELOW_ONE])),
    st.sampled_from([0.3, 1.0, 2.0]),
)
def test_a_drawn_token_has_distance_zero_and_other_tokens_their_gap(
    logits: list[float], u: float, temperature: float
) -> None:
    token, logprob = draw_one(logits, u, temperature)
    assert distance_of(logits, token, u, temperature) == (pytest.approx(0.0, abs=1e-9), logprob)
    weights = np.exp((np.array(logits) - max(logits)) / temperature)
    p = weights / weights.sum()
    for other in range(len(logits)):
        gap = max(odds(p[:other].sum()) - odds(u), odds(u) - odds(p[: other + 1].sum()), 0.0)
        assert distance_of(logits, other, u, temperature)[0] == pytest.approx(gap, abs=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_the_distance_for_nan_logits_is_nan() -> None:
    assert np.isnan(distance_of([0.0, float("nan")], 0, 0.5)).all()


def test_an_interval_by_hand() -> None:
    logits = np.log(np.array([[1, 3, 4]], np.float32))
    below, logprobs = interval(logits, np.array([1]), 1.0)
    assert below == pytest.approx([1 / 8]) and logprobs == pytest.approx([np.log(3 / 8)])
    at = np.array([1 / 16, 0.25, 0.5, 0.75])
    found = nats_outside(np.repeat(below, 4), np.repeat(logprobs, 4), at)
    assert found == pytest.approx([np.log(15 / 7), 0, 0, np.log(3)], abs=1e-6)
