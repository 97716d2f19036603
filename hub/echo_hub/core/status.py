"""Status of the coordinator for dashboards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from echo_hub.core.policy.curriculum import CurriculumStatus
from echo_hub.core.settings import CoordinatorSettings
from echo_shared.records.node import TrustStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorStatus:
    """Figures of the coordinator at one moment."""

    trained_steps: int
    published_version: int
    training_step: int | None
    """Step that the learner is computing; None while the learner is idle."""
    groups_preparing: int
    groups_open: int
    """Number of the learner's waiting groups that are not complete."""
    groups_buffered: int
    """Number of complete groups that wait for a step to train on them."""
    groups_planned: int
    """Number of groups in planned batches that are not trained: those of the current and the next step."""
    nodes_connected: int
    leased_by_node: Mapping[str, int]
    """Rollouts leased to each node and not received yet."""
    in_flight: int
    """Number of unfinished rollouts."""
    finished: bool
    session_slots: int = 0
    """Number of sessions that may be open at the same time; 0 while the environment is away, or without sessions."""
    session_slots_used: int = 0
    """Number of unfinished episodes of open groups whose episodes are sessions."""
    lacks_session_slots: bool = False
    """True if a group could be opened, but too few slots for its sessions are free."""
    requests_open: int = 0
    """Number of unfinished groups of tenants' samples."""
    spend_per_hour: float = 0.0
    """Total cost of all active nodes in US dollars per hour."""
    nodes_priced: int = 0
    """Number of connected nodes with a price."""
    nodes_active: int = 0
    """Number of connected nodes with a price that are active: they may get leases and are paid."""
    trust: TrustStatus = field(default_factory=TrustStatus)
    curriculum: CurriculumStatus | None = None
    withdrawn: Mapping[int, str] = field(default_factory=dict)
    """Versions that no lease names because engines cannot use them, each with the reason."""
    settings: CoordinatorSettings | None = None
    """Current settings, including operators' changes."""

    @property
    def leasing(self) -> str:
        """Return the leasing state set by the operator, or "drained" if it is "draining" and no open group or lease is
        left."""
        said = self.settings.leasing if self.settings else "open"
        return "drained" if said == "draining" and not (self.groups_open or any(self.leased_by_node.values())) else said


class StatusSource(Protocol):
    """Interface of an object that returns a coordinator's status, such as `echo_hub.core.coordinator.Coordinator`."""

    def status(self) -> CoordinatorStatus: ...
