"""Selection of a step's training rollouts by advantage, and how often each of them is trained on.

Source: Shuffle-R1 (arXiv 2508.05612). Pairwise trajectory sampling: a group is sorted by advantage. The largest is
paired with the smallest, the second largest with the second smallest, and so on. The half of the pairs with the largest
contrast is kept: both ends of the sorted group.

Advantage-based batch shuffle: from the M pairs of the whole step, S sub-batches of M / S pairs each are drawn. Each
sub-batch draws pairs without replacement, with chances proportional to |A_i| + |A_j|. So a pair is in 0 to S
sub-batches. An update of the optimizer uses one or more sub-batches. A pair in several of an update's sub-batches is
computed once, and its weight is multiplied by their number. The gradient is the same, without repeated passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def most_unlike(advantages_G: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return half of a group's pairs, rounded up: those whose advantages differ most, as indices of rollouts [P, 2].

    The middle rollout of an odd group has no pair. Equal advantages keep the rollouts' order. A single rollout is
    paired with itself.
    """
    size = len(advantages_G)
    if size == 1:
        return np.zeros((1, 2), np.intp)
    pairs = (size // 2 + 1) // 2
    order = np.argsort(advantages_G, kind="stable")
    return np.stack([order[::-1][:pairs], order[:pairs]], axis=1)


def shuffled(strengths_M: NDArray[np.float64], sub_batches: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return how often each pair is in each sub-batch, 0 or 1 [S, M].

    `strengths_M` is |A_i| + |A_j| for each pair. Pairs without advantage are in no sub-batch, so sub-batches may be
    smaller. If no pair has an advantage, pairs are distributed over the sub-batches in turn.
    """
    num_pairs = len(strengths_M)
    times_SM = np.zeros((sub_batches, num_pairs), np.int64)
    if not strengths_M.any():
        times_SM[np.arange(num_pairs) % sub_batches, np.arange(num_pairs)] = 1
        return times_SM
    chances_M = strengths_M / strengths_M.sum()
    # The chance of a weak pair may underflow to 0 next to a strong one, so count only pairs with a chance above 0.
    size = min(-(-num_pairs // sub_batches), int(np.count_nonzero(chances_M)))
    for times_M in times_SM:
        times_M[rng.choice(num_pairs, size=size, replace=False, p=chances_M)] = 1
    return times_SM


def times_trained(
    advantages: Sequence[NDArray[np.float64]],
    there: Sequence[NDArray[np.bool_]],
    *,
    sub_batches: int,
    rng: np.random.Generator,
) -> list[list[NDArray[np.int64]]]:
    """Return how often each rollout of each group [G] is trained on in each sub-batch; 0 means not at all.

    `there` marks the rollouts that may be chosen. `sub_batches` is the number S; 0 means a single sub-batch with every
    kept pair.
    """
    places = [np.flatnonzero(mask) for mask in there]
    kept = [
        place[most_unlike(of_group[place])] if len(place) else np.zeros((0, 2), np.intp)
        for of_group, place in zip(advantages, places, strict=True)
    ]
    strengths = [np.abs(of_group[pairs]).sum(axis=1) for of_group, pairs in zip(advantages, kept, strict=True)]
    times_SM = np.ones((1, sum(map(len, kept))), np.int64)
    if sub_batches and times_SM.size:
        times_SM = shuffled(np.concatenate(strengths), sub_batches, rng)
    ends = np.cumsum([len(pairs) for pairs in kept])[:-1]
    return [
        [
            _of_rollouts(len(mask), pairs, count)
            for mask, pairs, count in zip(there, kept, np.split(times_M, ends), strict=True)
        ]
        for times_M in times_SM
    ]


def _of_rollouts(size: int, pairs: NDArray[np.intp], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    times = np.zeros(size, np.int64)
    times[pairs[:, 0]] = times[pairs[:, 1]] = counts
    return times
