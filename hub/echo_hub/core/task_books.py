"""Figures of each task per step, for runs that train on several tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import fmean

from echo_hub.core.accounting.groups import RolloutGroup
from echo_hub.core.policy.mixture import Mixture, TrainedTask
from echo_shared.records.run import TaskFigures


class TaskBooks:
    """Counts, by task, the groups dropped for equal rewards since the last planned step. A restart resets the
    counts."""

    def __init__(
        self, mixture: Mixture | None, tasks: tuple[TrainedTask, ...], *, discount: float | None = None
    ) -> None:
        """`mixture` None: the run has one task, so no figures are kept. `discount`: discount of returns with turn-level
        advantages, else None."""
        self._mixture = mixture
        self._discount = discount
        self._tasks = tasks
        self._num_flat = Counter[int]()

    def dropped_flat(self, group_id: int) -> None:
        """Count a group that was dropped because its rewards are equal."""
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
