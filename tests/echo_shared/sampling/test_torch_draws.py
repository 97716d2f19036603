from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from echo_shared.sampling import draws, torch_draws

ALMOST_ONE = float(np.nextafter(1.0, 0.0))


@pytest.fixture(scope="module", params=[0, 2**18])
def float64_values(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test twice: as usual, and with float32 also for draws from few logits, which usually use float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_draws, "_FLOAT64_VALUES", request.param)
        yield


def drawn(
    logits: NDArray[np.float32],
    u: NDArray[np.float64],
    temperatures: NDArray[np.float64],
    draw: torch_draws.Choose = torch_draws.draw,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    tokens, logprobs = draw(torch.from_numpy(logits), torch.from_numpy(u), torch.from_numpy(temperatures))
    assert (tokens.dtype, logprobs.dtype) == (torch.int64, torch.float64)
    return tokens.numpy(), logprobs.numpy()


@pytest.mark.usefixtures("float64_values")
@pytest.mark.parametrize("vocabulary", [1, 2, 3, 100, 1_023, 1_024, 1_025, 5_000, 151_936, 200_000])
@pytest.mark.parametrize("temperature", [0.01, 0.3, 1.0, 10.0])
def test_equals_the_reference(vocabulary: int, temperature: float) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = (rng.standard_normal((9, vocabulary)) * 4).astype(np.float32)
    logits[3, : vocabulary // 2] = -np.inf
    logits[4, 1:] = -np.inf
    logits[5] *= 1e30
    u = rng.random(9)
    u[0], u[1] = 0.0, ALMOST_ONE
    tokens, logprobs = drawn(logits, u, np.full(9, temperature))
    expected_tokens, expected_logprobs = draws.draw(logits, u, temperature)
    np.testing.assert_array_equal(tokens, expected_tokens)
    np.testing.assert_allclose(logprobs, expected_logprobs, rtol=1e-12, atol=1e-6)
    tokens, logprobs = drawn(logits, u, np.full(9, temperature), torch_draws.draw_float64)
    np.testing.assert_array_equal(tokens, expected_tokens)
    np.testing.assert_allclose(logprobs, expected_logprobs, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("float64_values")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_used_without_rounding(dtype: torch.dtype) -> None:
    logits = (torch.randn((20, 3_000), generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    u = np.random.default_rng(1).random(20)
    tokens, _ = torch_draws.draw(logits, torch.from_numpy(u), torch.ones(20, dtype=torch.float64))
    np.testing.assert_array_equal(tokens.numpy(), draws.draw(logits.float().numpy(), u, 1.0)[0])


@pytest.mark.parametrize("chunk", [1, 5_600, 2**27])
def test_each_row_has_its_temperature_for_every_chunk_size(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((50, 333)) * 4).astype(np.float32)
    u, temperatures = rng.random(50), rng.uniform(0.3, 2.0, 50)
    whole = drawn(logits, u, temperatures)
    monkeypatch.setitem(torch_draws._CHUNK_BYTES, "cpu", chunk)
    for one, other in zip(whole, drawn(logits, u, temperatures), strict=True):
        np.testing.assert_array_equal(one, other)
    for row in range(50):
        expected, _ = draws.draw(logits[row : row + 1], u[row : row + 1], float(temperatures[row]))
        assert whole[0][row] == expected[0]


@pytest.mark.usefixtures("float64_values")
@given(
    weights=st.lists(st.booleans(), min_size=1, max_size=40).filter(any),
    repeats=st.sampled_from([1, 64, 2_000]),
    u=st.floats(0.0, 1.0, exclude_max=True),
)
@settings(max_examples=60, deadline=None)
def test_ties_and_impossible_ids_are_exact(weights: list[bool], repeats: int, u: float) -> None:
    """Weights of 1 and 0 have exact sums, so every uniform must select the reference's token."""
    logits = np.where(np.repeat(weights, repeats), 0.0, -np.inf).astype(np.float32)[None]
    for one in (u, 0.0, ALMOST_ONE, 0.5):
        tokens, logprobs = drawn(logits, np.array([one]), np.ones(1))
        expected, expected_logprobs = draws.draw(logits, np.array([one]), 1.0)
        assert tokens[0] == expected[0]
        assert logprobs[0] == pytest.approx(expected_logprobs[0], abs=1e-12)


@pytest.mark.usefixtures("float64_values")
@given(
    logits=st.lists(
        st.one_of(st.floats(-1e4, 1e4, width=32), st.sampled_from([0.0, -np.inf, 3e38, -3e38])),
        min_size=1,
        max_size=60,
    ).filter(lambda values: max(values) > -np.inf),
    repeats=st.sampled_from([1, 40]),
    u=st.floats(0.0, 1.0, exclude_max=True),
    temperature=st.floats(0.01, 10.0),
)
@settings(max_examples=100, deadline=None)
def test_the_tokens_interval_contains_the_uniform(
    logits: list[float], repeats: int, u: float, temperature: float
) -> None:
    """The bounds of the token's interval of cumulative probability have a tolerance, because exp differs between
    libraries in the last bits.
    """
    row = np.repeat(np.array(logits, dtype=np.float32), repeats)
    scaled = row.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    cumulative = np.cumsum(weights)
    target, slack = u * cumulative[-1], 1e-12 * cumulative[-1]
    for draw, tolerance in ((torch_draws.draw, 1e-6), (torch_draws.draw_float64, 1e-12)):
        (token,), (logprob,) = drawn(row[None], np.array([u]), np.array([temperature]), draw)
        assert weights[token] > 0
        assert cumulative[token] - weights[token] - slack <= target <= cumulative[token] + slack
        expected = scaled[token] - scaled.max() - np.log(cumulative[-1])
        assert logprob == pytest.approx(expected, rel=1e-12, abs=tolerance)


@pytest.mark.usefixtures("float64_values")
@pytest.mark.parametrize("vocabulary", [64, 4_000])
def test_rounding_at_the_top_draws_the_last_possible_id(vocabulary: int) -> None:
    logits = np.zeros((1, vocabulary), np.float32)
    logits[0, vocabulary - 3 :] = -np.inf
    for u in (ALMOST_ONE, 1.0):
        assert drawn(logits, np.array([u]), np.ones(1))[0][0] == vocabulary - 4


@pytest.mark.usefixtures("float64_values")
@pytest.mark.parametrize("vocabulary", [10, 4_000])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_give_no_number(vocabulary: int, value: float) -> None:
    logits = np.zeros((2, vocabulary), np.float32)
    logits[0, 4] = value
    tokens, logprobs = drawn(logits, np.full(2, 0.5), np.ones(2))
    assert np.isnan(logprobs).tolist() == [True, False]
    assert (tokens < vocabulary).all()


@pytest.mark.usefixtures("float64_values")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edges_and_their_neighbors_are_exact(dtype: torch.dtype) -> None:
    """2,048 equal weights have exact sums, so an edge is exactly k / 2,048."""
    edges = np.arange(1, 2_048, 9) / 2_048
    u = np.concatenate([np.nextafter(edges, 0.0), edges, np.nextafter(edges, 1.0), [0.0, ALMOST_ONE]])
    logits = torch.full((len(u), 2_048), 3.5, dtype=dtype)
    tokens, _ = torch_draws.draw(logits, torch.from_numpy(u), torch.full((len(u),), 0.7, dtype=torch.float64))
    np.testing.assert_array_equal(tokens.numpy(), np.floor(u * 2_048))


def test_the_host_draws_what_float32_leaves_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_draws, "_repeated", lambda margins_R: margins_R.topk(5, largest=False).indices)
    logits = np.random.default_rng(0).normal(size=(40, 7_000)).astype(np.float32)
    logits[7, 3] = np.nan
    cumulative = np.exp(logits.astype(np.float64)).cumsum(axis=1)
    u = np.random.default_rng(1).random(40)
    u[::2] = cumulative[::2, 2_500] / cumulative[::2, -1] + 1e-10
    arguments = torch.from_numpy(logits), torch.from_numpy(u), torch.ones(40, dtype=torch.float64)
    drawn = torch.stack(torch_draws.draw(*arguments)).numpy()
    assert 10 <= (drawn[0] == torch_draws.UNDECIDED).sum() <= 20
    torch_draws.redraw_undecided(drawn, *arguments)
    possible = np.arange(40) != 7
    np.testing.assert_array_equal(drawn[0, possible], draws.draw(logits[possible], u[possible], 1.0)[0])
    assert np.isnan(drawn[1]).nonzero()[0].tolist() == [7]


def test_a_device_is_not_waited_for() -> None:
    """The draw must not wait for the device. Here tensors are on the meta device: they have no values, so reading one
    fails.
    """
    u_R = torch.empty(64, dtype=torch.float64, device="meta")
    for vocabulary in (512, 5_003):
        for draw in (torch_draws.draw, torch_draws.draw_float64):
            tokens_R, logprobs_R = draw(torch.empty((64, vocabulary), device="meta"), u_R, u_R)
            assert tokens_R.shape == logprobs_R.shape == (64,)


def test_most_likely() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 3.0]])
    tokens, logprobs = torch_draws.most_likely(logits, torch.zeros(2), torch.ones(2))
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[[0, 1], [1, 0]])


@pytest.mark.parametrize("vocabulary", [1, 2, 100, 1_023, 1_024, 1_025, 5_000, 151_936])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_intervals_equal_the_reference(vocabulary: int, temperature: float) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = (rng.standard_normal((12, vocabulary)) * 4).astype(np.float32)
    logits[3, : vocabulary // 2] = -np.inf
    logits[4, 1:] = -np.inf
    logits[5] *= 1e30
    claimed = rng.integers(0, vocabulary, 12)
    claimed[6], claimed[7] = 0, vocabulary - 1
    found = torch_draws.interval(*(torch.from_numpy(value) for value in (logits, claimed, np.full(12, temperature))))
    for one, expected in zip(found, draws.interval(logits, claimed, temperature), strict=True):
        assert one.dtype == torch.float64
        np.testing.assert_allclose(one.numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("repeats", [1, 64, 2_000])
def test_intervals_are_exact_where_sums_are(repeats: int) -> None:
    logits = np.where(np.repeat([1, 0, 1, 1], repeats), 0.0, -np.inf).astype(np.float32)
    vocabulary = len(logits)
    claimed = np.array([0, repeats - 1, repeats, 2 * repeats, vocabulary - 1, min(1_024, vocabulary - 1)])
    rows = np.tile(logits, (len(claimed), 1)), claimed
    expected, _ = draws.interval(*rows, 1.0)
    below, _ = torch_draws.interval(*map(torch.from_numpy, rows), torch.ones(len(claimed), dtype=torch.float64))
    assert below.tolist() == expected.tolist()


@pytest.mark.parametrize("vocabulary", [10, 4_000])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_intervals_of_nan_logits_are_nan(vocabulary: int, value: float) -> None:
    logits = torch.zeros((2, vocabulary))
    logits[0, 4] = value
    below, logprobs = torch_draws.interval(logits, torch.tensor([1, 1]), torch.ones(2, dtype=torch.float64))
    assert below.isnan().tolist() == logprobs.isnan().tolist() == [True, False]


@pytest.mark.parametrize("vocabulary", [1, 2, 1_025, 151_936])
def test_shortfall_is_the_gap_to_the_likeliest_token(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = (rng.standard_normal((9, vocabulary)) * 4).astype(np.float32)
    tokens = rng.integers(0, vocabulary, 9)
    tokens[:4] = logits[:4].argmax(axis=1)
    logits[4, tokens[4]] = -np.inf if vocabulary > 1 else 0.0
    scaled = logits.astype(np.float64) / 0.7
    expected = scaled.max(axis=1) - scaled[np.arange(9), tokens]
    temperatures = torch.full((9,), 0.7, dtype=torch.float64)
    found = torch_draws.shortfall(torch.from_numpy(logits), torch.from_numpy(tokens), temperatures)
    possible = np.isfinite(expected)
    np.testing.assert_allclose(found.numpy()[possible], expected[possible], rtol=1e-12, atol=1e-12)
    assert (found[:4] == 0.0).all() and (found[~possible] > 600).all() and found.isfinite().all()
