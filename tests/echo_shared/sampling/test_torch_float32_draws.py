from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo_shared.sampling.torch_float32_draws import BLOCK, block_sums, draw_with_margins

VOCABULARY = 20_001


def hard_row(rng: np.random.Generator, tail: float) -> tuple[NDArray[np.float32], float]:
    """Return logits of one token and of equally unlikely others, whose weights have the sum `tail`, and a temperature.
    All weights have the same rounding error, the largest of a thousand tries.
    """
    temperatures = torch.from_numpy(rng.uniform(0.5, 2.0, 1_000))
    tops = torch.from_numpy(rng.uniform(-20, 20, 1_000).astype(np.float32))
    others = tops - (np.log(VOCABULARY / tail) * temperatures).float()
    weights = block_sums(torch.stack([tops, others], dim=1), temperatures)[0][:, -1] - 1.0
    exact = ((others.double() - tops.double()) / temperatures).exp()
    worst = int((weights / exact - 1.0).abs().argmax())
    row = np.full(VOCABULARY, others[worst].item(), np.float32)
    row[rng.integers(VOCABULARY)] = tops[worst].item()
    return row, float(temperatures[worst])


def rows_of(kind: str) -> list[tuple[NDArray[np.float32], float]]:
    rng = np.random.default_rng(0)
    if kind == "hard":
        return [hard_row(rng, tail) for tail in (0.01, 0.3, 1.0, 3.0, 30.0)]
    slopes = ((1.2, 0.01), (1.5, 0.5), (2.0, 1.0), (2.5, 1.3), (3.0, 10.0))
    ranks = [rng.permutation(VOCABULARY) + 1.0 for _ in slopes]
    return [((-slope * np.log(rank)).astype(np.float32), t) for (slope, t), rank in zip(slopes, ranks, strict=True)]


def block_weights(row: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    scaled = row.astype(np.float64) / temperature
    return np.pad(np.exp(scaled - scaled.max()), (0, -VOCABULARY % BLOCK)).reshape(-1, BLOCK).sum(axis=1)


@pytest.mark.parametrize(("kind", "least"), [("hard", 0.3), ("powers", 0.0)])
def test_the_error_of_sums_is_within_the_bound(kind: str, least: float) -> None:
    for row, temperature in rows_of(kind):
        expected = block_weights(row, temperature)
        sums, _ = block_sums(torch.from_numpy(row)[None], torch.tensor([temperature], dtype=torch.float64))
        outside = np.arange(len(expected)) != expected.argmax()
        weight = expected[outside].sum()
        bound = 2.0**-24 * weight * (3 * np.log(VOCABULARY / weight) + 12)
        assert least < np.abs(sums[0, 1:].numpy() - expected)[outside].sum() / bound < 1.0


@pytest.mark.parametrize("kind", ["hard", "powers"])
def test_certain_tokens_are_the_references(kind: str) -> None:
    """Half of the uniforms are at most 1e-5 away from an edge of a token's interval."""
    rng = np.random.default_rng(1)
    for row, temperature in rows_of(kind):
        scaled = row.astype(np.float64) / temperature
        cumulative = np.cumsum(np.exp(scaled - scaled.max()))
        u = rng.random(10_000)
        edges = cumulative[np.searchsorted(cumulative, u[::2] * cumulative[-1])] / cumulative[-1]
        u[::2] = (edges + rng.choice([-1, 1], 5_000) * 10 ** rng.uniform(-11, -5, 5_000)).clip(0.0, 1 - 1e-16)
        tokens, logprobs, margins = many(torch.from_numpy(row), temperature, torch.from_numpy(u))
        expected = np.searchsorted(cumulative, u * cumulative[-1], side="right")
        certain = margins.numpy() > 0
        np.testing.assert_array_equal(tokens.numpy()[certain], expected[certain])
        logprobs_of_expected = scaled[expected] - scaled.max() - np.log(cumulative[-1])
        np.testing.assert_allclose(logprobs.numpy()[certain], logprobs_of_expected[certain], rtol=0, atol=2e-6)


def many(row: Tensor, temperature: float, u_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `draw_with_margins` gives for one row of logits and many uniforms."""
    temperature_N = torch.full_like(u_N, temperature)
    of_row = row[None], *block_sums(row[None], temperature_N[:1])
    found = [
        draw_with_margins(*(value.expand(len(u), -1) for value in of_row), u, temperatures)
        for u, temperatures in zip(u_N.split(500), temperature_N.split(500), strict=True)
    ]
    tokens, logprobs, margins = (torch.cat(parts) for parts in zip(*found, strict=True))
    return tokens, logprobs, margins
