"""`echo_shared.sampling.draws.draw` for many rows at once, with one temperature per row, fast at any vocabulary size.

Arithmetic is float64, as in `draw`, the reference. For a large vocabulary, blocks are summed, and only the drawn
token's block is accumulated; the changed order of additions changes sums by parts in 1e16.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

_BLOCK: Final = 1_024
_CHUNK_VALUES: Final = 131_072
"""Number of logits per chunk: in float64, a chunk fits a core's cache."""


def draw_rows(
    logits_NV: NDArray[np.float32],
    rows_R: NDArray[np.int64],
    u_R: NDArray[np.float64],
    temperature_R: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Draw one token for each index in `rows_R`, from that row of `logits_NV`. An index may occur several times.

    Returns token ids [R] and their log-probabilities [R] in nats at the row's temperature; NaN if a logit is NaN.
    """
    tokens_R = np.empty(len(rows_R), dtype=np.int64)
    logprobs_R = np.empty(len(rows_R), dtype=np.float64)
    vocabulary = logits_NV.shape[1]
    if vocabulary <= _BLOCK:
        step = _CHUNK_VALUES // vocabulary
        for start in range(0, len(rows_R), step):
            chunk = slice(start, start + step)
            scaled = logits_NV[rows_R[chunk]].astype(np.float64)
            scaled /= temperature_R[chunk, None]
            tokens_R[chunk], logprobs_R[chunk] = _draw_small(scaled, u_R[chunk])
        return tokens_R, logprobs_R
    # Reuse one buffer: allocating memory for each row would cost more than the arithmetic.
    scratch_V = np.empty(vocabulary, np.float64)
    for number, row in enumerate(rows_R.tolist()):
        tokens_R[number], logprobs_R[number] = _draw_large(
            logits_NV[row], float(u_R[number]), float(temperature_R[number]), scratch_V
        )
    return tokens_R, logprobs_R


def _draw_small(
    scaled_RV: NDArray[np.float64], u_R: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    scaled_RV -= scaled_RV.max(axis=1, keepdims=True)
    weights = np.exp(scaled_RV)
    cumulative = weights.cumsum(axis=1)
    totals = cumulative[:, -1]
    tokens: NDArray[np.int64] = (cumulative <= (u_R * totals)[:, None]).sum(axis=1)
    if tokens.max() == weights.shape[1]:
        for row in np.flatnonzero(tokens == weights.shape[1]):
            tokens[row] = _last_possible(weights[row])
    return tokens, scaled_RV[np.arange(len(tokens)), tokens] - np.log(totals)


def _draw_large(
    logits_V: NDArray[np.float32], u: float, temperature: float, scratch_V: NDArray[np.float64]
) -> tuple[int, float]:
    np.copyto(scratch_V, logits_V)
    if temperature != 1.0:
        scratch_V /= temperature
    top = float(logits_V.max()) / temperature
    scratch_V -= top
    weights = np.exp(scratch_V, out=scratch_V)
    blocks = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)).cumsum()
    total = float(blocks[-1])
    exceeded = u * total
    block = min(int(blocks.searchsorted(exceeded, side="right")), len(blocks) - 1)
    before = blocks[block - 1] if block else 0.0
    begin = block * _BLOCK
    inside = before + weights[begin : begin + _BLOCK].cumsum()
    token = begin + int(inside.searchsorted(exceeded, side="right"))
    if token == begin + len(inside):
        token = _last_possible(weights[:token])
    return token, float(logits_V[token]) / temperature - top - math.log(total)


def _last_possible(weights: NDArray[np.float64]) -> int:
    """Return the last token id with a positive weight. This id is drawn if, by rounding, the sum of all weights is
    below the random number that selects the token.
    """
    return int(np.max(np.flatnonzero(weights), initial=0))
