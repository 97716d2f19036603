"""Seeded inverse-CDF sampling, which defines the token that a node must draw for a rollout.

Token t of rollout `index` under `seed` is the first token id whose cumulative probability exceeds u[t]. Probabilities
are summed in id order, under the full softmax at the lease's temperature; u[t] is output t of Philox(key=(seed,
index)). Every backend draws this way, so a check with the same weights can recompute a rollout: `interval` locates a
token in the cumulative distribution, and `nats_outside` gives the distance of u from it. This numpy code is the
reference; tests compare other implementations with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

LEAST_TAIL: Final = 1e-3
"""Smallest tail probability, at either end of [0, 1], that counts in log-odds. Smaller tails are rounding noise, so
they are raised to this value.
"""


def derive_seed(*parts: int | str) -> int:
    """Return a 64-bit seed, hashed from `parts`. Unlike `seed + i`, adjacent values give unrelated seeds."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        encoded = f"{type(part).__name__}:{part}".encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return int.from_bytes(digest.digest(), "little")


def uniforms(seed: int, index: int, count: int) -> NDArray[np.float64]:
    """Return u[0:count] in [0, 1) for rollout `index` of the group with this seed, 53 random bits each. A larger
    `count` only appends values.
    """
    return all_uniforms([(seed, index, count)])


def group_uniforms(seed: int, indices: Sequence[int], count: int) -> NDArray[np.float64]:
    """Return the `uniforms` of several rollouts of one group, [len(indices), count]."""
    return all_uniforms([(seed, index, count) for index in indices]).reshape(len(indices), count)


def all_uniforms(drawn: Iterable[tuple[int, int, int]]) -> NDArray[np.float64]:
    """Return `uniforms` of each (seed, index, count), concatenated."""
    generator = np.random.Philox(key=0)
    # One generator is reused: setting its state takes a third of the time of making another generator.
    state = generator.state
    rows = [np.empty(0, np.uint64)]
    for seed, index, count in drawn:
        state["state"]["key"][:] = seed, index
        generator.state = state
        rows.append(generator.random_raw(count))
    return (np.concatenate(rows) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(
    logits_RV: NDArray[np.float32], u_R: NDArray[np.float64], temperature: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Draw one token per row.

    Args: `logits_RV` [rows, vocabulary]; `u_R` [rows] in [0, 1); `temperature` > 0 divides the logits. Returns: token
    ids [rows] and their log-probabilities [rows] in nats, under the softmax at `temperature`.

    If rounding leaves the total of all probabilities below u, the last id with non-zero probability is drawn.
    """
    scaled = logits_RV.astype(np.float64) / temperature
    scaled -= scaled.max(axis=-1, keepdims=True)
    weights = np.exp(scaled)
    cumulative = np.cumsum(weights, axis=-1)
    totals = cumulative[:, -1]
    exceeds = cumulative > (u_R * totals)[:, None]
    last_possible = weights.shape[-1] - 1 - np.argmax(weights[:, ::-1] > 0, axis=-1)
    tokens = np.where(exceeds.any(axis=-1), exceeds.argmax(axis=-1), last_possible)
    rows = np.arange(len(tokens))
    return tokens, scaled[rows, tokens] - np.log(totals)


def interval(
    logits_RV: NDArray[np.float32], tokens_R: NDArray[np.integer], temperature: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the lower end of each token's interval, and the token's log-probability, both [rows]. The interval is the
    range of cumulative probability within which u draws the token; its width is the token's probability.

    Log-probabilities are in nats, -inf for probability 0. Both results are NaN where logits are not finite.
    """
    scaled = logits_RV.astype(np.float64) / temperature
    scaled -= scaled.max(axis=-1, keepdims=True)
    cumulative = np.cumsum(np.exp(scaled), axis=-1)
    rows = np.arange(len(tokens_R))
    totals = cumulative[:, -1]
    below = np.where(tokens_R > 0, cumulative[rows, tokens_R - 1], 0.0)
    return below / totals, scaled[rows, tokens_R] - np.log(totals)


def nats_outside(
    below_R: NDArray[np.floating], logprobs_R: NDArray[np.floating], u_R: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the distance [rows] of each u from the interval of cumulative probability that draws its token. The
    interval starts at `below_R` and is exp(`logprobs_R`) wide.

    The unit is nats of log-odds, ln(x / (1 - x)); 0 inside the interval. Rounding of logits by n nats moves an edge by
    about n nats of log-odds, wherever the edge is. Cumulative probability would be a worse unit: most forged draws miss
    near 0 and 1, where distances in it are tiny.
    """
    below = below_R.astype(np.float64)
    return _nats_apart(below, below + np.exp(logprobs_R.astype(np.float64)), u_R)


def _nats_apart(below: NDArray[np.float64], above: NDArray[np.float64], u: NDArray[np.float64]) -> NDArray[np.float64]:
    low, high, drawn = (_log_odds(place.clip(LEAST_TAIL, 1.0 - LEAST_TAIL)) for place in (below, above, u))
    return np.maximum(np.maximum(low - drawn, drawn - high), 0.0)


def _log_odds(probability: NDArray[np.float64]) -> NDArray[np.float64]:
    odds: NDArray[np.float64] = np.log(probability) - np.log1p(-probability)
    return odds
