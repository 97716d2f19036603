"""What dashboards may know of the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from echo_hub.core.curriculum import CurriculumStatus
from echo_hub.core.settings import CoordinatorSettings
from echo_shared.node_books import TrustStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorStatus:
    """One moment; the store has the run's whole books."""

    trained_steps: int
    published_version: int
    training_step: int | None
    """None while the learner has nothing to do."""
    groups_preparing: int
    groups_open: int
    """Groups that wait for the learner and are not complete."""
    groups_buffered: int
    """Complete groups that wait for a step."""
    groups_planned: int
    """Groups in written batches that are not trained: of the step in training, and of the next."""
    nodes_connected: int
    leased_by_node: Mapping[str, int]
    """Rollouts leased to each node and not yet received."""
    in_flight: int
    """Rollouts that are not final."""
    finished: bool
    spend_per_hour: float = 0.0
    """What all active nodes cost together, in US dollars."""
    nodes_priced: int = 0
    """Connected nodes that cost something."""
    nodes_active: int = 0
    """Of these: how many are active."""
    trust: TrustStatus = field(default_factory=TrustStatus)
    curriculum: CurriculumStatus | None = None
    """What is known of the problems; None where each is taken as it comes."""
    withdrawn: Mapping[int, str] = field(default_factory=dict)
    """Versions that are leased to nobody, each with the reason."""
    settings: CoordinatorSettings | None = None
    """As they are, with what operators have changed of them."""

    @property
    def leasing(self) -> str:
        """As the operator has said, or drained: a drain has come to its end, and nothing is under way any more."""
        said = self.settings.leasing if self.settings else "open"
        return "drained" if said == "draining" and not (self.groups_open or any(self.leased_by_node.values())) else said
