"""Which rollouts of a step are trained on, and how often, by their advantages.

Source: Shuffle-R1 (arXiv 2508.05612). Pairwise trajectory sampling: a group is sorted by advantage, the largest is
paired with the smallest, the second with the second but one, and so on; the half of the pairs that are most unlike is
kept. The first pairs are the most unlike ones, so the half that is kept is both ends of the order.

Advantage-based batch shuffle: from the M pairs of the whole step, S sub-batches of M / S pairs each are drawn, in each
of them a pair at most once and by chances in proportion to |A_i| + |A_j|. So a pair is in 0 to S of them. Here it is
computed once, with that number in its weight: the same gradient, without the passes that would repeat it.
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
    """In how many of the sub-batches each pair of the step is, [M]. `strengths_M`: |A_i| + |A_j|.

    A pair without advantage is in none, so that sub-batches are smaller where there are too few with one; if none has
    any, each is in one.
    """
    size = -(-len(strengths_M) // sub_batches)
    if not strengths_M.any():
        return np.ones(len(strengths_M), np.int64)
    chances_M = strengths_M / strengths_M.sum()
    # Beside a strong pair the chance of the weakest may be 0 in float64.
    size = min(size, int(np.count_nonzero(chances_M)))
    times = np.zeros(len(strengths_M), np.int64)
    for _ in range(sub_batches):
        times[rng.choice(len(times), size=size, replace=False, p=chances_M)] += 1
    return times


def times_trained(
    advantages: Sequence[NDArray[np.float64]],
    there: Sequence[NDArray[np.bool_]],
    *,
    sub_batches: int,
    rng: np.random.Generator,
) -> list[NDArray[np.int64]]:
    """How often each rollout of each group [G] counts: 0, it is left out. `there`: those that may be chosen.
    `sub_batches`: S; 0 = each kept pair counts once."""
    places = [np.flatnonzero(mask) for mask in there]
    kept = [
        place[most_unlike(of_group[place])] if len(place) else np.zeros((0, 2), np.intp)
        for of_group, place in zip(advantages, places, strict=True)
    ]
    strengths = [np.abs(of_group[pairs]).sum(axis=1) for of_group, pairs in zip(advantages, kept, strict=True)]
    counts = [np.ones(len(pairs), np.int64) for pairs in kept]
    if sub_batches and any(map(len, kept)):
        times_M = shuffled(np.concatenate(strengths), sub_batches, rng)
        counts = np.split(times_M, np.cumsum([len(pairs) for pairs in kept])[:-1])
    return [_of_rollouts(len(mask), pairs, count) for mask, pairs, count in zip(there, kept, counts, strict=True)]


def _of_rollouts(size: int, pairs: NDArray[np.intp], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each rollout is in one pair at most."""
    times = np.zeros(size, np.int64)
    times[pairs[:, 0]] = times[pairs[:, 1]] = counts
    return times
