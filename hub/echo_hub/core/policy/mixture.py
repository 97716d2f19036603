"""Task of each training group in a mixture: a pure function of the run's seed and the group's id.

Every `BLOCK` consecutive groups contain each task as often as its weight demands, in an order that varies by block. So
shares are far more even than with independent draws. The number of a group among the groups of its task follows from
seed and id, without counting:

    weights 3 and 1, a block of 8:   groups   0 1 2 3 4 5 6 7 | 8 ...
                                     task     0 0 1 0 0 0 1 0 | 0 ...
                                     number   2 5 1 0 1 4 0 3 | 7 ...    each number of a task once

`TaskTally` has the figures of each task per step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Final, NamedTuple

from echo_hub.core.accounting.groups import RolloutGroup
from echo_shared.records.run import TaskFigures
from echo_shared.sampling.permutation import permuted

BLOCK: Final = 1_000
"""Number of groups per block. Set by hand: within a block, the tasks' shares are exact to a thousandth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTask:
    key: str
    solved_at: float = 1.0
    """Lowest reward with which an episode of the task counts as solved."""
    lowest: float = 0.0
    """Lowest reward that the task can give."""

    def pass_rate(self, rewards: Sequence[float]) -> float:
        """Return the group's mean reward, scaled to 0 .. 1: exactly 1 if all rewards count as solved, exactly 0 if all
        are the task's lowest.
        """
        shares = [(reward - self.lowest) / (self.solved_at - self.lowest) for reward in rewards]
        return fmean(min(share, 1.0) for share in shares)


class GroupPlace(NamedTuple):
    """Task of one group, and the group's number within the task."""

    task: int
    """Index of the task in the settings' `tasks`."""
    number: int
    """Number among the groups of that task: 0, 1, ..., each once, shuffled within a block."""


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Return each task's number of groups per block, rounded by the largest-remainder method.

    A task with nonzero weight gets at least one group. Without weights, there are no groups.
    """
    if not weights:
        return ()
    total = sum(weights)
    exact = [weight / total * BLOCK for weight in weights]
    found = [max(int(share), int(weight > 0)) for share, weight in zip(exact, weights, strict=True)]
    by_remainder = sorted(range(len(weights)), key=lambda task: found[task] - exact[task])
    while (missing := BLOCK - sum(found)) != 0:
        if missing > 0:
            for task in [task for task in by_remainder if weights[task] > 0][:missing]:
                found[task] += 1
        else:  # Tiny weights were rounded up, so the largest share gives up a group.
            found[max(range(len(found)), key=found.__getitem__)] -= 1
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Distribution of groups over tasks."""

    run_seed: int
    quotas: tuple[int, ...]
    """Groups of each task per block; the sum is `BLOCK`. Empty if the run has no task."""

    @classmethod
    def of(cls, run_seed: int, weights: Sequence[float]) -> Mixture:
        return cls(run_seed=run_seed, quotas=quotas(weights))

    def place(self, group_id: int) -> GroupPlace:
        """Return the task of a training group, and the group's number within the task."""
        if len(self.quotas) == 1:
            return GroupPlace(0, group_id)
        block, at = divmod(group_id, BLOCK)
        slot = permuted(at, BLOCK, "mixture", self.run_seed, block)
        ends = list(accumulate(self.quotas))
        task = bisect_right(ends, slot)
        quota = self.quotas[task]
        return GroupPlace(task, block * quota + slot - (ends[task] - quota))


class TaskTally:
    """Counts, by task, the groups dropped for equal rewards since the last planned step. A restart resets the
    counts."""

    def __init__(
        self, mixture: Mixture | None, tasks: tuple[TrainedTask, ...], *, discount: float | None = None
    ) -> None:
        """`mixture` None: the run has one task, so no figures are kept. `discount`: discount of the returns that give
        each turn its own advantage; None: one advantage per episode."""
        self._mixture = mixture
        self._discount = discount
        self._tasks = tasks
        self._num_flat = Counter[int]()

    def dropped_flat(self, group_id: int) -> None:
        if self._mixture is not None:
            self._num_flat[self._mixture.place(group_id).task] += 1

    def planned(self, groups: Iterable[RolloutGroup]) -> dict[str, TaskFigures]:
        """Return the figures of a step with these groups; empty with a single task."""
        if self._mixture is None:
            return {}
        of_task: dict[int, list[RolloutGroup]] = {}
        for group in groups:
            of_task.setdefault(self._mixture.place(group.group_id).task, []).append(group)
        num_flat, self._num_flat = self._num_flat, Counter()
        return {
            task.key: self._figures(task, of_task.get(number, []), num_flat[number])
            for number, task in enumerate(self._tasks)
            if self._mixture.quotas[number]
        }

    def _figures(self, task: TrainedTask, groups: list[RolloutGroup], num_dropped: int) -> TaskFigures:
        rewards = [reward for group in groups for reward in group.rewards]
        return TaskFigures(
            num_groups=len(groups),
            mean_reward=fmean(rewards) if rewards else None,
            share_solved=fmean(reward >= task.solved_at for reward in rewards) if rewards else None,
            num_flat=num_dropped + sum(not group.has_advantage(discount=self._discount) for group in groups),
        )
