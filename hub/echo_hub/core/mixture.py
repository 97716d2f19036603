"""Which task of a mixture each group of training is for: a pure function of the run's seed and the group's id.

Of every `BLOCK` groups in a row each task has as many as its weight says, in an order that differs from block to block.
So shares are kept far more evenly than by draws that know nothing of each other, and the number that a group has among
those of its task is known without counting:

    weights 3 and 1, a block of 8:   groups   0 1 2 3 4 5 6 7 | 8 ...
                                     task     0 0 1 0 0 0 1 0 | 0 ...
                                     number   2 5 1 0 1 4 0 3 | 7 ...    each number of a task once
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Final, NamedTuple

from echo_hub.core.permutation import permuted

BLOCK: Final = 1_000
"""Groups; shares are kept to a thousandth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTask:
    """One task of a mixture, as the coordinator knows it."""

    key: str
    solved_at: float = 1.0
    """The lowest reward that counts as solved."""
    lowest: float = 0.0
    """Of its rewards."""

    def pass_rate(self, rewards: Sequence[float]) -> float:
        """0 .. 1: the mean of a group's rewards; exactly 1 if all are solved, exactly 0 if all are the lowest."""
        shares = [(reward - self.lowest) / (self.solved_at - self.lowest) for reward in rewards]
        return fmean(min(share, 1.0) for share in shares)


class Place(NamedTuple):
    """Where a group stands."""

    task: int
    """Which of the run's tasks, in the order of its settings."""
    number: int
    """Among the groups of that task: 0, 1, ..., each once, though in no order within a block."""


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """How many groups of a block each task has, by largest remainders; at least one of each whose weight is not 0."""
    total = sum(weights)
    exact = [weight / total * BLOCK for weight in weights]
    found = [max(int(share), int(weight > 0)) for share, weight in zip(exact, weights, strict=True)]
    by_remainder = sorted(range(len(weights)), key=lambda task: found[task] - exact[task])
    while (missing := BLOCK - sum(found)) != 0:
        if missing > 0:
            for task in [task for task in by_remainder if weights[task] > 0][:missing]:
                found[task] += 1
        else:  # Tiny weights were rounded up: the largest share pays.
            found[max(range(len(found)), key=found.__getitem__)] -= 1
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """By a run's seed and its tasks' weights."""

    run_seed: int
    quotas: tuple[int, ...]
    """Of a block; they sum to `BLOCK`."""

    @classmethod
    def of(cls, run_seed: int, weights: Sequence[float]) -> Mixture:
        return cls(run_seed=run_seed, quotas=quotas(weights))

    def place(self, group_id: int) -> Place:
        """Of a group of training."""
        if len(self.quotas) == 1:
            return Place(0, group_id)
        block, at = divmod(group_id, BLOCK)
        slot = permuted(at, BLOCK, "mixture", self.run_seed, block)
        ends = list(accumulate(self.quotas))
        task = bisect_right(ends, slot)
        quota = self.quotas[task]
        return Place(task, block * quota + slot - (ends[task] - quota))
