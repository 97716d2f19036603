"""The staleness bound as arithmetic: the number of groups to open, and the versions fresh enough for a step.

A learner with version k - 1 trains step k. A rollout sampled with version p then has staleness k - 1 - p. Admission
follows AReaL (arXiv 2505.24298, section 5.1): (S + v + 1)·B - consumed, counted in whole groups, with two changes.
First, `v` is the version that new leases name, at most the learner's version. An old published version's samples are
consumed later, so fewer groups may be open. Second, each count starts from the present state: the groups of all steps
without a batch that may still consume samples of `v`, minus the waiting groups. So it stays right after restarts, after
drops, and with variable batch sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo_hub.core.settings import CoordinatorSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Expected groups of the coming steps."""

    next_step: int
    """First step without a batch."""
    next_batch: int
    """Expected number of groups in that step; at least 1."""
    later_batches: int
    """Expected number of groups in each later step; 0 = unknown."""

    def step_of(self, position: int) -> int:
        """Return the step that is expected to take the group at `position` of the learner's queue; position 0 is the
        oldest waiting group."""
        if position < self.next_batch:
            return self.next_step
        return self.next_step + 1 + (position - self.next_batch) // max(1, self.later_batches)

    def end_of(self, step: int) -> int:
        """Return the first position of the learner's queue after the groups of this step."""
        return self.next_batch + (step - self.next_step) * max(1, self.later_batches)


def room(settings: CoordinatorSettings, outlook: Outlook, *, lease_version: int, waiting_groups: int) -> int:
    """Return how many groups may be opened now, if new leases name `lease_version`. `waiting_groups`: groups being
    prepared, open or complete, but in no batch."""
    steps_after = min(settings.staleness_bound + lease_version + 1, settings.steps) - outlook.next_step
    if steps_after < 0:
        return 0
    return max(0, outlook.next_batch + steps_after * outlook.later_batches - waiting_groups)


def oldest_useful_version(settings: CoordinatorSettings, step: int) -> int:
    """Return the oldest version whose rollouts step `step` may consume."""
    return max(0, step - 1 - settings.staleness_bound)
