"""The draw in float32 (`torch_draws.draw`) against float64: equal tokens in millions of draws, and processor time.

Many tokens are drawn from each row of logits, so that `block_sums` and the reference sum a row's weights only once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.harness.progress import Planned, Progress, most
from echo_shared.sampling import torch_draws
from echo_shared.sampling.torch_float32_draws import block_sums, draw_with_margins

DRAWS: Final = {49_152: 8_000_000, 151_936: 2_000_000}
"""Number of draws that are compared with the reference, by size of the vocabulary."""
DRAWS_OF_ROW: Final = 20_000
AT_EDGES: Final = 0.01
"""Share of draws whose uniform is close to an edge of a token's interval."""
LEAST_DISTANCE: Final = 5e-11
"""Minimum distance of a uniform from an edge. Closer to an edge, the reference's own rounding error decides the token,
because the reference adds 151,936 weights one after another.
"""
AT_ONCE: Final = 500
WIDTHS: Final = (1, 8, 64)
TURNS: Final = 5

Rows = list[dict[str, Any]]


def plan() -> list[Planned]:
    return [
        *(
            Planned(name=f"equal draws, {vocabulary:,} tokens", seconds=count / 1e5)
            for vocabulary, count in DRAWS.items()
        ),
        *(Planned(name=f"time of a draw, {vocabulary:,} tokens", seconds=3) for vocabulary in DRAWS),
    ]


def measure(progress: Progress, seed: int) -> Rows:
    rows: Rows = []
    for vocabulary, count in DRAWS.items():
        if progress.wants(name := f"equal draws, {vocabulary:,} tokens"):
            figures = equal_draws(vocabulary, count, seed)
            progress.done(name, figures)
            rows.append({"part": "equal draws", "vocabulary": vocabulary, **figures})
    for vocabulary in DRAWS:
        if progress.wants(name := f"time of a draw, {vocabulary:,} tokens"):
            ratios = {width: over_float64(vocabulary, width, seed) for width in WIDTHS}
            progress.done(name, {f"over float64, width {width}": ratio for width, ratio in ratios.items()})
            rows += [
                {"part": "draw time", "vocabulary": vocabulary, "width": width, "over_float64": ratio}
                for width, ratio in ratios.items()
            ]
    return rows


def equal_draws(vocabulary: int, count: int, seed: int) -> dict[str, Any]:
    """Return the number of draws, the number of draws that equal the reference's token, and the number that were
    repeated in float64.
    """
    rng = np.random.default_rng(seed)
    drawn = equal = in_float64 = 0
    while drawn < count:
        logits_V, temperature = _logits(rng, vocabulary), float(rng.choice([0.3, 0.7, 1.0, 1.0, 1.3]))
        u_N, expected_N = _uniforms(rng, logits_V, temperature, min(DRAWS_OF_ROW, count - drawn))
        tokens_N, repeated = _tokens(torch.from_numpy(logits_V)[None], torch.from_numpy(u_N), temperature)
        drawn += len(u_N)
        equal += int((tokens_N.numpy() == expected_N).sum())
        in_float64 += repeated
    return {"draws": drawn, "equal": equal, "in_float64": in_float64}


def _tokens(logits_1V: Tensor, u_N: Tensor, temperature: float) -> tuple[Tensor, int]:
    """Return the tokens from `torch_draws.draw`, and the number of tokens that it drew again in float64."""
    temperature_N = torch.full_like(u_N, temperature)
    sums, top = block_sums(logits_1V, temperature_N[:1])
    drawn = []
    for u, temperatures in zip(u_N.split(AT_ONCE), temperature_N.split(AT_ONCE), strict=True):
        logits, sums_of_rows, tops = (value.expand(len(u), -1) for value in (logits_1V, sums, top))
        drawn.append(draw_with_margins(logits, sums_of_rows, tops, u, temperatures))
    tokens_N, _, margins_N = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    rows = torch.nonzero(margins_N <= 0).squeeze(1)
    logits = logits_1V.expand(len(rows), -1)
    tokens_N[rows], _ = torch_draws.draw_float64(logits, u_N[rows], temperature_N[rows])
    return tokens_N, len(rows)


def _logits(rng: np.random.Generator, vocabulary: int) -> NDArray[np.float32]:
    """Return logits [V] like those of a language model: probabilities fall with a power of the token's rank."""
    ranks = rng.permutation(vocabulary) + 1.0
    logits_V: NDArray[np.float64] = rng.uniform(-20, 20) - rng.uniform(1.5, 3.0) * np.log(ranks)
    return logits_V.astype(np.float32)


def _uniforms(
    rng: np.random.Generator, logits_V: NDArray[np.float32], temperature: float, count: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return at most `count` uniforms [N], and the tokens [N] that the reference (`draws.draw`) gives for them. A share
    AT_EDGES of the uniforms is close to an edge of a token's interval.
    """
    scaled = logits_V.astype(np.float64) / temperature
    cumulative = np.cumsum(np.exp(scaled - scaled.max()))
    cumulative /= cumulative[-1]
    u_N = rng.random(count)
    close = int(AT_EDGES * count)
    edges_N = cumulative[np.searchsorted(cumulative, u_N[:close])]
    u_N[:close] = edges_N + rng.choice([-1, 1], close) * 10 ** rng.uniform(np.log10(LEAST_DISTANCE), -5, close)
    tokens_N = np.searchsorted(cumulative, u_N, side="right")
    below_N = np.where(tokens_N > 0, cumulative[tokens_N - 1], 0.0)
    above_N = cumulative[np.minimum(tokens_N, len(cumulative) - 1)]
    clear = (u_N - below_N > LEAST_DISTANCE) & (above_N - u_N > LEAST_DISTANCE)
    return u_N[clear], tokens_N[clear]


def over_float64(vocabulary: int, width: int, seed: int) -> float:
    """Return the processor time of `draw` divided by that of `draw_float64`. The two are measured alternately."""
    rng = np.random.default_rng(seed)
    logits_RV = torch.from_numpy(np.stack([_logits(rng, vocabulary) for _ in range(width)]))
    u_R = torch.from_numpy(rng.random(width))
    arguments = logits_RV, u_R, torch.ones_like(u_R)
    repetitions = 1 + 2_000_000 // logits_RV.numel()
    both = torch_draws.draw, torch_draws.draw_float64
    times = np.array([[_seconds(draw, arguments, repetitions) for draw in both] for _ in range(TURNS)])
    own_s, float64_s = times.min(axis=0).tolist()
    return float(own_s / float64_s)


def _seconds(draw: Callable[..., object], arguments: tuple[Tensor, ...], repetitions: int) -> float:
    began_s = time.process_time()
    for _ in range(repetitions):
        draw(*arguments)
    return time.process_time() - began_s


def headline(rows: Rows) -> dict[str, Any]:
    """Return the number of draws and of equal draws, and the largest processor time of a draw relative to float64."""
    compared = [row for row in rows if row["part"] == "equal draws"]
    return {
        "draws": sum(row["draws"] for row in compared) if compared else None,
        "draws_equal": sum(row["equal"] for row in compared) if compared else None,
        "draw_time_over_float64": most(rows, "over_float64"),
    }
