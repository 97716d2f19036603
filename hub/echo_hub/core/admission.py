"""The staleness gate as arithmetic: how much may be opened, and which versions are fresh enough for a step.

Step k is trained by a learner that holds version k - 1; a rollout sampled by version p then has staleness k - 1 - p.
The rule of admission is AReaL's (arXiv 2505.24298, section 5.1), (S + v + 1)·B - consumed, counted in whole groups,
with two departures. `v` is the version that new leases name, never above the learner's: what is sampled by a version
that has not been published for a while is consumed later, so less of it may be opened. And it is written for the steps
ahead: those that have no batch yet and may still consume what `v` samples take so many groups, less those that wait; so
the rule holds after a restart and after drops, without any re-basing, and where a step's number of groups varies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from echo_hub.core.settings import CoordinatorSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Which groups the steps ahead will take, as far as is known."""

    next_step: int
    """The next step without a batch."""
    next_batch: int
    """How many groups it is expected to take; at least 1."""
    later_batches: int
    """How many groups each step after that one is expected to take; 0 while nobody knows."""

    def step_of(self, position: int) -> int:
        """The step that takes the group at `position` in the queue; 0 = the oldest that waits."""
        if position < self.next_batch:
            return self.next_step
        return self.next_step + 1 + (position - self.next_batch) // max(1, self.later_batches)

    def end_of(self, step: int) -> int:
        """The first position in the queue that is none of this step's, nor of one before."""
        return self.next_batch + (step - self.next_step) * max(1, self.later_batches)


def room(settings: CoordinatorSettings, outlook: Outlook, *, lease_version: int, waiting_groups: int) -> int:
    """How many groups may still be opened. `waiting_groups`: in preparation, open or complete, in no step's batch."""
    steps_after = min(settings.staleness_bound + lease_version + 1, settings.steps) - outlook.next_step
    if steps_after < 0:
        return 0
    return max(0, outlook.next_batch + steps_after * outlook.later_batches - waiting_groups)


def oldest_useful_version(settings: CoordinatorSettings, step: int) -> int:
    """The oldest version whose rollouts step `step` may consume."""
    return max(0, step - 1 - settings.staleness_bound)


class SortedIds(list[int]):
    """Group ids in ascending order: a list that is changed by these methods alone. Ids come and go mostly at the two
    ends, which a list does fast."""

    __slots__ = ()

    def __init__(self, ids: Iterable[int] = ()) -> None:
        super().__init__(sorted(ids))

    def __contains__(self, group_id: object) -> bool:
        assert isinstance(group_id, int)
        position = bisect_left(self, group_id)
        return position < len(self) and self[position] == group_id

    def add(self, group_id: int) -> None:
        """Adds the id; harmless when it is there already."""
        position = bisect_left(self, group_id)
        if position == len(self) or self[position] != group_id:
            self.insert(position, group_id)

    def discard(self, group_id: int) -> None:
        """Removes the id; harmless when it is not there."""
        position = bisect_left(self, group_id)
        if position < len(self) and self[position] == group_id:
            del self[position]

    def discard_all(self, group_ids: Collection[int]) -> None:
        """Removes many ids in one pass."""
        gone = set(group_ids)
        self[:] = [group_id for group_id in self if group_id not in gone]

    def first(self, count: int) -> tuple[int, ...]:
        """The `count` smallest ids."""
        return tuple(self[:count])

    def last(self, count: int) -> tuple[int, ...]:
        """The `count` largest ids, in order."""
        return tuple(self[-count:])

    def position(self, group_id: int) -> int:
        """How many ids are smaller."""
        return bisect_left(self, group_id)
