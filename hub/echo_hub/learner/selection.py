"""Which rollouts of a group are trained on, by their advantages.

Source: Shuffle-R1 (arXiv 2508.05612), pairwise trajectory sampling: a group is sorted by advantage, the largest is
paired with the smallest, the second with the second but one, and so on; the half of the pairs that are most unlike is
kept. The first pairs are the most unlike ones, so the half that is kept is both ends of the order. The rest of that
paper, which draws rollouts of strong advantage several times, is not here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def most_unlike(advantages_G: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether each rollout is in the kept half of the pairs, rounded up; of an odd group the middle one has no pair.

    Equal advantages are in the rollouts' order. A rollout alone stays.
    """
    size = len(advantages_G)
    pairs = (size // 2 + 1) // 2
    kept = np.full(size, size == 1)
    order = np.argsort(advantages_G, kind="stable")
    kept[order[:pairs]] = kept[order[size - pairs :]] = True
    return kept
