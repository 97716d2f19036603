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
from typing import Generic, TypeVar

from echo_hub.core.settings import CoordinatorSettings


def staleness(learner_version: int, policy_version: int) -> int:
    """Optimizer steps from sampling to consumption, queue time included; 0 = on-policy."""
    return learner_version - policy_version


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


def room(settings: CoordinatorSettings, outlook: Outlook, *, lease_version: int, waiting_groups: int) -> int:
    """How many groups may still be opened. `waiting_groups`: in preparation, open or complete, in no step's batch."""
    steps_after = min(settings.staleness_bound + lease_version + 1, settings.steps) - outlook.next_step
    if steps_after < 0:
        return 0
    return max(0, outlook.next_batch + steps_after * outlook.later_batches - waiting_groups)


def oldest_useful_version(settings: CoordinatorSettings, step: int) -> int:
    """The oldest version whose rollouts step `step` may consume."""
    return max(0, step - 1 - settings.staleness_bound)


_Key = TypeVar("_Key", int, tuple[int, float, int])


class SortedKeys(Generic[_Key]):
    """Keys in ascending order, such as group ids. They come and go mostly at the two ends, which a list does fast."""

    def __init__(self, keys: Iterable[_Key] = ()) -> None:
        self._keys: list[_Key] = sorted(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, position: int) -> _Key:
        return self._keys[position]

    def __contains__(self, key: _Key) -> bool:
        position = bisect_left(self._keys, key)
        return position < len(self._keys) and self._keys[position] == key

    def add(self, key: _Key) -> None:
        """Adds the key; harmless when it is there already."""
        position = bisect_left(self._keys, key)
        if position == len(self._keys) or self._keys[position] != key:
            self._keys.insert(position, key)

    def discard(self, key: _Key) -> None:
        """Removes the key; harmless when it is not there."""
        position = bisect_left(self._keys, key)
        if position < len(self._keys) and self._keys[position] == key:
            del self._keys[position]

    def discard_all(self, keys: Collection[_Key]) -> None:
        """Removes many keys in one pass."""
        gone = set(keys)
        self._keys = [key for key in self._keys if key not in gone]

    def first(self, count: int) -> tuple[_Key, ...]:
        """The `count` smallest keys."""
        return tuple(self._keys[:count])

    def position(self, key: _Key) -> int:
        """How many keys are smaller."""
        return bisect_left(self._keys, key)
