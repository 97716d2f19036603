"""`draw` and `interval` of `echo_shared.sampling.draws` in torch, for many rows at once, on the logits' device.

Arithmetic is float64, as in the reference. A large vocabulary is summed in blocks, and only the token's block is
accumulated. This changes the order of additions, so sums differ from the reference by parts in 1e16.

float64 is slow on CPUs, and on consumer GPUs it has 1/64 of float32's speed. So `draw` uses float32 where the error
bound of `torch_float32_draws` proves the token, and repeats the few other rows in float64.

Only `redraw_undecided` synchronizes with the device. On a device all shapes are fixed, so a CUDA graph can capture a
draw.

Dimensions: R rows, V vocabulary, B tokens in a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo_shared.sampling.torch_float32_draws import block_sums, draw_with_margins

Choose = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function from (logits [R, V], uniforms [R], temperatures [R]) to token ids [R] and their log-probabilities [R]."""

UNDECIDED: Final = -1
"""Stands in place of a token id if float32 cannot decide the token. `redraw_undecided` must then draw the token."""

_BLOCK: Final = 1_024
_CHUNK_BYTES: Final = {"cpu": 2**20}
"""Size of a chunk's weights: on a CPU, they must fit a core's cache."""
_DEVICE_CHUNK_BYTES: Final = 2**27
_FLOAT64_VALUES: Final = 2**18
"""Number of logits below which a draw uses float64: the float32 method has more operations, which take about 100 µs on
a CPU.
"""
_ROWS_PER_REPEAT: Final = 8
"""On a GPU, the draws with the smallest margins, one eighth of the rows, are always repeated in float64. Of
SmolLM2-135M's draws, 1 in 100 is undecided.
"""
_LEAST_WEIGHT: Final = 1e-300
"""Floor for underflowed weights. It keeps log() finite."""


def draw(logits_RV: Tensor, u_R: Tensor, temperature_R: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row. `u_R` (uniforms) and `temperature_R` are float64; logits have at most 32 bits.

    Returns token ids [R] (int64) and their log-probabilities [R] (float64, nats), on the device of `u_R`.
    Log-probabilities have float32's precision, and are NaN where logits are not finite. Except on the CPU, tokens may
    be UNDECIDED: call `redraw_undecided`.
    """
    if logits_RV.shape[1] <= _BLOCK or logits_RV.numel() < _FLOAT64_VALUES:
        return draw_float64(logits_RV, u_R, temperature_R)
    logits_RV = logits_RV.to(u_R.device)
    sums, top_R1 = _joined(block_sums(*rows) for rows in _chunks(logits_RV, temperature_R, weight_bytes=4))
    tokens_R, logprobs_R, margins_R = draw_with_margins(logits_RV, sums, top_R1, u_R, temperature_R)
    tokens_R = tokens_R.where(margins_R > 0, UNDECIDED)
    rows = _repeated(margins_R)
    if len(rows):
        tokens_R[rows], logprobs_R[rows] = draw_float64(logits_RV[rows], u_R[rows], temperature_R[rows])
    return tokens_R, logprobs_R


def draw_float64(logits_RV: Tensor, u_R: Tensor, temperature_R: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row like `draw`, but compute everything in float64, so that no token is UNDECIDED."""
    return _joined(_draw(*rows) for rows in _chunks(logits_RV, u_R, temperature_R))


def redraw_undecided(drawn: NDArray[np.float64], logits_RV: Tensor, u_R: Tensor, temperature_R: Tensor) -> None:
    """Draw each UNDECIDED token of `drawn` again, in place. `drawn` has the token ids and log-probabilities that `draw`
    returned for these arguments, [2, R].
    """
    undecided = np.flatnonzero(drawn[0] == UNDECIDED)
    if len(undecided):
        rows = torch.from_numpy(undecided).to(u_R.device)
        tokens, logprobs = draw_float64(logits_RV[rows], u_R[rows], temperature_R[rows])
        drawn[:, undecided] = torch.stack([tokens.double(), logprobs]).numpy(force=True)


def interval(logits_RV: Tensor, tokens_R: Tensor, temperature_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower end of each token's interval, and the log-probabilities of `tokens_R` (int64). The interval is
    the range of cumulative probability within which u draws the token.

    Both results are [R], float64, on the device of `temperature_R`. `tokens_R` must be on this device. NaN where logits
    are not finite.
    """
    return _joined(_interval(*rows) for rows in _chunks(logits_RV, tokens_R, temperature_R))


def shortfall(logits_RV: Tensor, tokens_R: Tensor, temperature_R: Tensor) -> Tensor:
    """Return each token's log-probability deficit to the most likely token, in nats [R]; 0 for a greedy choice.

    Devices and types are those of `interval`.
    """
    short_R, _ = _joined(_shortfall(*rows) for rows in _chunks(logits_RV, tokens_R, temperature_R))
    return short_R


def most_likely(logits_RV: Tensor, _u_R: Tensor, _temperature_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most likely token of each row [R] and its log-probability [R] in nats. The parameters are those of
    `draw`.
    """
    logprobs_R, tokens_R = logits_RV.float().log_softmax(dim=-1).max(dim=-1)
    return tokens_R, logprobs_R


def _repeated(margins_R: Tensor) -> Tensor:
    """Return the rows to repeat in float64: on a CPU all undecided rows; on other devices a fixed number of rows, so
    that the host need not wait for the device.
    """
    if margins_R.device.type == "cpu":
        return (margins_R <= 0).nonzero().squeeze(1)
    return margins_R.topk(-(-len(margins_R) // _ROWS_PER_REPEAT), largest=False).indices


def _chunks(logits_RV: Tensor, *by_row: Tensor, weight_bytes: int = 8) -> Iterator[tuple[Tensor, ...]]:
    most_bytes = _CHUNK_BYTES.get(by_row[0].device.type, _DEVICE_CHUNK_BYTES)
    chunk = max(1, most_bytes // (weight_bytes * logits_RV.shape[-1]))
    return zip(*(torch.split(value, chunk) for value in (logits_RV, *by_row)), strict=True)


def _joined(chunks: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    found = list(chunks)
    if len(found) == 1:
        return found[0]
    first, second = zip(*found, strict=True)
    return torch.cat(first), torch.cat(second)


def _weights(logits_RV: Tensor, temperature_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return unnormalized probabilities [R, V] and the largest scaled logit [R, 1], on the temperatures' device."""
    weights_RV = logits_RV.to(device=temperature_R.device, dtype=torch.float64, copy=True).div_(temperature_R[:, None])
    top_R1 = weights_RV.amax(dim=1, keepdim=True)
    return weights_RV.sub_(top_R1).exp_(), top_R1


def _draw(logits_RV: Tensor, u_R: Tensor, temperature_R: Tensor) -> tuple[Tensor, Tensor]:
    vocabulary = logits_RV.shape[1]
    weights_RV, top_R1 = _weights(logits_RV, temperature_R)
    if vocabulary <= _BLOCK:
        cumulative_RV = weights_RV.cumsum(dim=1)
        totals_R1 = cumulative_RV[:, -1:]
        tokens_R1 = _first_above(cumulative_RV, u_R[:, None] * totals_R1)
    else:
        tokens_R1, totals_R1 = _draw_by_blocks(weights_RV, u_R)
    tokens_R1 = tokens_R1.clamp_(max=vocabulary - 1)  # NaN logits give an index past the end of the vocabulary.
    return tokens_R1.squeeze(1), _logprobs(logits_RV, tokens_R1, temperature_R, top_R1, totals_R1)


def _logprobs(logits_RV: Tensor, tokens_R1: Tensor, temperature_R: Tensor, top_R1: Tensor, totals_R1: Tensor) -> Tensor:
    chosen_R1 = logits_RV.gather(1, tokens_R1.to(logits_RV.device)).to(device=top_R1.device, dtype=torch.float64)
    return (chosen_R1 / temperature_R[:, None] - top_R1 - totals_R1.log()).squeeze(1)


def _interval(logits_RV: Tensor, tokens_R: Tensor, temperature_R: Tensor) -> tuple[Tensor, Tensor]:
    below_R1, totals_R1, top_R1 = _edges(logits_RV, tokens_R, temperature_R)
    logprobs_R = _logprobs(logits_RV, tokens_R[:, None], temperature_R, top_R1, totals_R1)
    return (below_R1 / totals_R1).squeeze(1), logprobs_R


def _shortfall(logits_RV: Tensor, tokens_R: Tensor, temperature_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's log-probability deficit to the most likely token (its shortfall) [R], and the probability of
    the most likely token [R].
    """
    weights_RV, _ = _weights(logits_RV, temperature_R)
    totals_R = weights_RV.sum(dim=1)
    own_R = weights_RV.gather(1, tokens_R[:, None]).squeeze(1)
    return -own_R.clamp(min=_LEAST_WEIGHT).log(), totals_R.reciprocal()


def _edges(logits_RV: Tensor, tokens_R: Tensor, temperature_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three results, each [R, 1]: the weight of all ids before the token, the weight of all ids, and the largest
    scaled logit.
    """
    weights_RV, top_R1 = _weights(logits_RV, temperature_R)
    tokens_R1 = tokens_R[:, None]
    if weights_RV.shape[1] <= _BLOCK:
        place_R1, up_to_RB = tokens_R1, weights_RV.cumsum(dim=1)
        before_R1, totals_R1 = torch.zeros_like(top_R1), up_to_RB[:, -1:]
    else:
        blocks = _block_sums(weights_RV).cumsum(dim=1)
        before_R1, inside_RB = _of_block(weights_RV, blocks, tokens_R1 // _BLOCK)
        place_R1, up_to_RB = tokens_R1 % _BLOCK, before_R1 + inside_RB.cumsum(dim=1)
        totals_R1 = blocks[:, -1:]
    below_R1 = torch.where(place_R1 > 0, up_to_RB.gather(1, (place_R1 - 1).clamp(min=0)), before_R1)
    return below_R1, totals_R1, top_R1


def _draw_by_blocks(weights_RV: Tensor, u_R: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token for each row. Return the tokens [R, 1] and the rows' total weights [R, 1]."""
    blocks = _block_sums(weights_RV).cumsum(dim=1)
    totals_R1 = blocks[:, -1:]
    target_R1 = u_R[:, None] * totals_R1
    block_R1 = _first_above(blocks, target_R1).clamp_(max=blocks.shape[1] - 1)
    before_R1, inside_RB = _of_block(weights_RV, blocks, block_R1)
    tokens_R1 = block_R1 * _BLOCK + _first_above(before_R1 + inside_RB.cumsum(dim=1), target_R1)
    return tokens_R1, totals_R1


def _block_sums(weights_RV: Tensor) -> Tensor:
    """Return the sum of each block's weights [R, blocks]; the last block may be shorter."""
    vocabulary = weights_RV.shape[1]
    whole = vocabulary // _BLOCK * _BLOCK
    sums: Tensor = weights_RV[:, :whole].unflatten(1, (-1, _BLOCK)).sum(dim=2)
    if whole < vocabulary:
        sums = torch.cat([sums, weights_RV[:, whole:].sum(dim=1, keepdim=True)], dim=1)
    return sums


def _of_block(weights_RV: Tensor, blocks: Tensor, block_R1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the total weight before the block [R, 1], and the block's weights [R, B], 0 past the vocabulary.

    `blocks` holds cumulative block sums.
    """
    vocabulary = weights_RV.shape[1]
    before_R1 = blocks.gather(1, (block_R1 - 1).clamp_(min=0)).masked_fill_(block_R1 == 0, 0.0)
    ids_RB = block_R1 * _BLOCK + torch.arange(_BLOCK, device=weights_RV.device)
    inside_RB = weights_RV.gather(1, ids_RB.clamp(max=vocabulary - 1)).masked_fill_(ids_RB >= vocabulary, 0.0)
    return before_R1, inside_RB


def _first_above(cumulative_RN: Tensor, target_R1: Tensor) -> Tensor:
    """Return, for each row, the first index at which the cumulative weight exceeds the target [R, 1]. If rounding
    leaves no such index, return the last one with non-zero weight.
    """
    last_R1 = torch.searchsorted(cumulative_RN, cumulative_RN[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(cumulative_RN, target_R1.contiguous(), right=True), last_R1)
