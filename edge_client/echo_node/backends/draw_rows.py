"""`echo_shared.draws.draw` for many rows at once, each with its temperature, fast at any vocabulary size.

The same float64 arithmetic as the reference. A large vocabulary is summed by blocks and only the block that holds the
token is accumulated, which reorders additions: the sums differ by parts in 1e16.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_BLOCK: Final = 1_024
_CHUNK_VALUES: Final = 131_072
"""Values drawn from at a time: what stays in a core's cache as float64."""


def draw_rows(
    logits_NV: NDArray[np.float32],
    rows_R: NDArray[np.int64],
    u_R: NDArray[np.float64],
    temperature_R: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Draw one token from each row `rows_R` of `logits_NV`; the same row may be drawn from many times.

    Returns: token ids [R] and their log-probabilities [R] in nats at their row's temperature; NaN where logits are.
    """
    tokens_R = np.empty(len(rows_R), dtype=np.int64)
    logprobs_R = np.empty(len(rows_R), dtype=np.float64)
    step = max(1, _CHUNK_VALUES // logits_NV.shape[1])
    for start in range(0, len(rows_R), step):
        chunk = slice(start, start + step)
        scaled = logits_NV[rows_R[chunk]].astype(np.float64)
        scaled /= temperature_R[chunk, None]
        tokens_R[chunk], logprobs_R[chunk] = _draw_chunk(scaled, u_R[chunk])
    return tokens_R, logprobs_R


def _draw_chunk(
    scaled_RV: NDArray[np.float64], u_R: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    vocabulary = scaled_RV.shape[1]
    rows = np.arange(len(scaled_RV))
    scaled_RV -= scaled_RV.max(axis=1, keepdims=True)
    weights = np.exp(scaled_RV)
    begin = np.zeros(len(rows), np.int64)
    if vocabulary <= _BLOCK:
        cumulative = np.cumsum(weights, axis=1)
        totals = cumulative[:, -1]
        exceeded = u_R * totals
        in_reach = cumulative
    else:
        blocks = np.cumsum(np.add.reduceat(weights, np.arange(0, vocabulary, _BLOCK), axis=1), axis=1)
        totals = blocks[:, -1]
        exceeded = u_R * totals
        block = np.minimum((blocks <= exceeded[:, None]).sum(axis=1), blocks.shape[1] - 1)
        begin = block * _BLOCK
        before = np.where(block > 0, blocks[rows, block - 1], 0.0)
        ids = begin[:, None] + np.arange(_BLOCK)
        inside = np.where(ids < vocabulary, weights[rows[:, None], np.minimum(ids, vocabulary - 1)], 0.0)
        in_reach = before[:, None] + np.cumsum(inside, axis=1)
    tokens = begin + (in_reach <= exceeded[:, None]).sum(axis=1)
    end = np.minimum(begin + in_reach.shape[1], vocabulary)
    for row in np.flatnonzero(tokens >= end):
        # Rounding left the sum below u: the last id that could have been drawn.
        tokens[row] = np.max(np.flatnonzero(weights[row, : end[row]]), initial=0)
    return tokens, scaled_RV[rows, tokens] - np.log(totals)
