"""What dashboards may know of the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echo_shared.messages import DropReason


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorStatus:
    """One moment. Counts `..._since_start` begin at zero when the hub starts; the store has the run's whole books."""

    trained_steps: int
    published_version: int
    learner_version: int | None
    """None while the learner is away."""
    training_step: int | None
    """None while the learner has nothing to do."""
    groups_preparing: int
    groups_open: int
    """Not complete."""
    groups_buffered: int
    """Complete, waiting for a step."""
    groups_planned: int
    """In the batch that is being trained."""
    nodes_connected: int
    leases_outstanding: int
    rollouts_leased: int
    rollouts_received: int
    """Waiting for their score."""
    rollouts_scored: int
    leased_by_node: Mapping[str, int]
    """Rollouts leased to each node and not yet received."""
    leased_since_start: int
    trained_since_start: int
    evaluated_since_start: int
    dropped_since_start: Mapping[DropReason, int]
    finished: bool

    @property
    def in_flight(self) -> int:
        """Rollouts that are not final."""
        return self.rollouts_leased + self.rollouts_received + self.rollouts_scored
