"""Which rollouts of a step are trained on, and how often, by their advantages.

Source: Shuffle-R1 (arXiv 2508.05612). Pairwise trajectory sampling: a group is sorted by advantage, the largest is
paired with the smallest, the second with the second but one, and so on; the half of the pairs that are most unlike is
kept. The first pairs are the most unlike ones, so the half that is kept is both ends of the order.

Advantage-based batch shuffle: from the M pairs of the whole step, S sub-batches of M / S pairs each are drawn, in each
of them a pair at most once and by chances in proportion to |A_i| + |A_j|. So a pair is in 0 to S of them. An update of
the optimizer has one sub-batch or several; a pair that is in several of them is computed once, with that number in its
weight: the same gradient, without the passes that would repeat it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def most_unlike(advantages_G: NDArray[np.float64]) -> NDArray[np.intp]:
    """The places of the half of the pairs [P, 2] that are most unlike, rounded up; of an odd group the middle one has
    no pair.

    Equal advantages are in the rollouts' order. A rollout alone is its own pair.
    """
    size = len(advantages_G)
    if size == 1:
        return np.zeros((1, 2), np.intp)
    pairs = (size // 2 + 1) // 2
    order = np.argsort(advantages_G, kind="stable")
    return np.stack([order[::-1][:pairs], order[:pairs]], axis=1)


def shuffled(strengths_M: NDArray[np.float64], sub_batches: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """How often each pair of the step is in each of the sub-batches, 0 or 1 [S, M]. `strengths_M`: |A_i| + |A_j|.

    A pair without advantage is in none, so that sub-batches are smaller where there are too few with one; if none has
    any, they are dealt out, each to one.
    """
    num_pairs = len(strengths_M)
    times_SM = np.zeros((sub_batches, num_pairs), np.int64)
    if not strengths_M.any():
        times_SM[np.arange(num_pairs) % sub_batches, np.arange(num_pairs)] = 1
        return times_SM
    chances_M = strengths_M / strengths_M.sum()
    # Beside a strong pair the chance of the weakest may be 0 in float64.
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
    """How often each rollout of each group [G] counts in each sub-batch: 0, it is not in it. `there`: those that may be
    chosen. `sub_batches`: S; 0 = there is one, in which each kept pair is."""
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
    """Each rollout is in one pair at most."""
    times = np.zeros(size, np.int64)
    times[pairs[:, 0]] = times[pairs[:, 1]] = counts
    return times
