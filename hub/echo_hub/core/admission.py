"""The staleness gate as arithmetic: how much may be opened, and which versions are fresh enough for a step.

Step k is trained by a learner that holds version k - 1; a rollout sampled by version p then has staleness k - 1 - p.
The rule of admission is AReaL's (arXiv 2505.24298, section 5.1), (S + v + 1)·B - consumed, counted in whole groups,
with two departures. `v` is the version that new leases name, never above the learner's: what is sampled by a version
that has not been published for a while is consumed later, so less of it may be opened. And `consumed` is not a running
count but trained steps · B, with every live group counted on the other side; so the rule holds after a restart and
after drops, without any re-basing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from echo_hub.core.settings import CoordinatorSettings


def staleness(learner_version: int, policy_version: int) -> int:
    """Optimizer steps from sampling to consumption, queue time included; 0 = on-policy."""
    return learner_version - policy_version


def room(settings: CoordinatorSettings, *, trained_steps: int, lease_version: int, live_groups: int) -> int:
    """How many groups may still be opened. `live_groups`: in preparation, open, complete or in a planned batch."""
    fresh = (settings.staleness_bound + lease_version + 1) * settings.groups_per_step
    needed = settings.steps * settings.groups_per_step
    consumed = trained_steps * settings.groups_per_step
    return max(0, min(fresh, needed) - consumed - live_groups)


def oldest_useful_version(settings: CoordinatorSettings, *, next_step: int, position: int = 0) -> int:
    """The oldest version whose rollouts may be consumed by the step that takes the group at `position` in the queue.

    `next_step` is the next step without a batch; position 0 = the oldest group that waits for it.
    """
    step = next_step + position // settings.groups_per_step
    return max(0, step - 1 - settings.staleness_bound)


class SortedIds:
    """Group ids in ascending order. Ids come and go mostly at the two ends, which a list does fast."""

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids = sorted(ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, position: int) -> int:
        return self._ids[position]

    def __contains__(self, group_id: int) -> bool:
        position = self.position(group_id)
        return position < len(self._ids) and self._ids[position] == group_id

    def add(self, group_id: int) -> None:
        """Harmless when it is there already."""
        if group_id not in self:
            insort(self._ids, group_id)

    def discard(self, group_id: int) -> None:
        """Harmless when it is not there."""
        if group_id in self:
            del self._ids[self.position(group_id)]

    def first(self, count: int) -> tuple[int, ...]:
        """The `count` smallest."""
        return tuple(self._ids[:count])

    def position(self, group_id: int) -> int:
        """How many ids are smaller."""
        return bisect_left(self._ids, group_id)
