"""`draw_rows` selects the same tokens as `draw`, the reference, for vocabularies of one block and of several blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_node.backends.draw_rows import draw_rows
from echo_shared.sampling import draws


@pytest.mark.parametrize("vocabulary", [1, 2, 100, 1_024, 1_025, 5_000, 150_000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_equals_the_reference(vocabulary: int, temperature: float) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = (rng.standard_normal((9, vocabulary)) * 4).astype(np.float32)
    logits[3, : vocabulary // 2] = -np.inf
    u = rng.random(9)
    u[0] = 0.0
    tokens, logprobs = draw_rows(logits, np.arange(9), u, np.full(9, temperature))
    expected_tokens, expected_logprobs = draws.draw(logits, u, temperature)
    np.testing.assert_array_equal(tokens, expected_tokens)
    np.testing.assert_allclose(logprobs, expected_logprobs, rtol=1e-12, atol=1e-12)


def test_each_row_has_its_temperature_and_rows_repeat() -> None:
    logits = np.random.default_rng(0).standard_normal((2, 50)).astype(np.float32)
    rows, u = np.array([1, 0, 1, 1]), np.array([0.1, 0.5, 0.9, 0.5])
    temperatures = np.array([1.0, 0.5, 2.0, 1.0])
    tokens, logprobs = draw_rows(logits, rows, u, temperatures)
    for number in range(4):
        token, logprob = draws.draw(logits[rows[number : number + 1]], u[number : number + 1], temperatures[number])
        assert (tokens[number], logprobs[number]) == (token[0], pytest.approx(logprob[0], abs=1e-12))


@pytest.mark.parametrize("vocabulary", [64, 4_000])
def test_rounding_at_the_top_draws_the_last_possible_id(vocabulary: int) -> None:
    logits = np.zeros((1, vocabulary), np.float32)
    logits[0, vocabulary - 3 :] = -np.inf
    almost_one = np.array([np.nextafter(1.0, 0.0)])
    for u in (almost_one, np.array([1.0])):
        tokens, _ = draw_rows(logits, np.array([0]), u, np.ones(1))
        assert tokens[0] == vocabulary - 4


def test_logits_that_are_not_numbers_give_no_number() -> None:
    logits = np.zeros((1, 10), np.float32)
    logits[0, 4] = np.nan
    with np.errstate(invalid="ignore"):
        _, logprobs = draw_rows(logits, np.array([0]), np.array([0.5]), np.ones(1))
    assert np.isnan(logprobs).all()


@settings(deadline=None, max_examples=150)
@given(
    vocabulary=st.one_of(st.integers(1, 40), st.integers(1_000, 5_000), st.integers(100_000, 200_000)),
    scale=st.sampled_from([0.0, 0.01, 1.0, 5.0, 100.0, 1e6, 1e30]),
    temperature=st.floats(0.01, 10.0),
    u=st.one_of(st.floats(0.0, 1.0, exclude_max=True), st.sampled_from([0.0, 5e-324, 2.0**-53, 0.5, 1.0 - 2.0**-53])),
    impossible=st.sampled_from([0.0, 0.5, 0.999]),
    ties=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_draw_rows_equals_the_reference(
    vocabulary: int, scale: float, temperature: float, u: float, impossible: float, ties: bool, seed: int
) -> None:
    """If the random number u of a draw is within rounding of the cumulative probability at which one token ends and the
    next begins, both tokens are accepted.
    """
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((2, vocabulary)) * scale).astype(np.float32)
    if ties:
        logits = np.round(logits / max(scale, 1e-9)).astype(np.float32)
    logits[:, rng.random(vocabulary) < impossible] = -np.inf
    logits[:, rng.integers(vocabulary)] = 0.0
    rows = np.array([1, 0])
    tokens, logprobs = draw_rows(logits, rows, np.full(2, u), np.full(2, temperature))
    expected_tokens, _ = draws.draw(logits[rows], np.full(2, u), temperature)
    for row, token, expected, logprob in zip(rows, tokens, expected_tokens, logprobs, strict=True):
        scaled = logits[row].astype(np.float64) / temperature
        weights = np.exp(scaled - scaled.max())
        assert weights[token] > 0
        assert logprob == pytest.approx(scaled[token] - scaled.max() - np.log(weights.sum()), rel=1e-12, abs=1e-11)
        if token != expected:
            between = weights[min(token, expected) + 1 : max(token, expected)].sum()
            edge = weights[: max(token, expected)].sum() / weights.sum()
            assert between <= 1e-12 * weights.sum()
            assert edge == pytest.approx(u, abs=1e-12)
