"""What the coordinator is told of the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from echo_hub.core.activation.settings import ActivationSettings
from echo_hub.core.nodes.node import NodeSettings, Samplers
from echo_hub.core.nodes.strangers import UNPROVEN_SHARE
from echo_hub.core.trust.settings import TrustSettings

Mode = Literal["colocated", "sequential", "async"]

_SAMPLERS: Final[dict[Mode, Samplers]] = {"colocated": "hub", "sequential": "any", "async": "by_version"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """`publish_every` is at most `max_staleness` + 1 in async mode, and 1 in sequential mode: else no lease is fresh
    enough to be consumed. In any other mode than async the staleness bound is 0, whatever `max_staleness` says."""

    mode: Mode
    steps: int
    groups_per_step: int
    group_size: int
    deadline_s: float
    max_staleness: int = 0
    publish_every: int = 1
    interrupts: bool = False
    """Nodes go on by newer versions in mid-completion; only in async mode."""
    multi_turn: bool = False
    """Episodes may have several turns."""
    dynamic_sampling: bool = False
    """A group whose rewards are all equal is dropped and another is sampled in its place."""
    tokens_per_step: int = 0
    """A step takes groups until they have so many drawn tokens, and no further ones; 0 = groups_per_step of them."""
    first_window: int = 4
    """Rollouts that a node may hold that has returned none yet, while no other node has; what more it claims, it has
    to earn."""
    run_seed: int = 0
    """What the draws of evaluations are derived from; groups of training come with their seeds."""
    evaluation_problems: int = 0
    """Held-out problems that nodes evaluate versions on; 0 = nodes evaluate nothing."""
    evaluation_samples: int = 0
    """Completions of each of them at the run's temperature, beside the greedy one."""
    activation: ActivationSettings = field(default_factory=ActivationSettings)
    """What nodes may cost."""
    trust: TrustSettings = field(default_factory=TrustSettings)
    """Who is checked; in co-located mode nobody is."""

    @property
    def staleness_bound(self) -> int:
        return self.max_staleness if self.mode == "async" else 0

    @property
    def nodes(self) -> NodeSettings:
        """What of this concerns nodes."""
        return NodeSettings(
            samplers=_SAMPLERS[self.mode],
            lease_size=1 if self.multi_turn else self.group_size,
            deadline_s=self.deadline_s,
            first_window=self.first_window,
            unproven_most=max(self.first_window, self.groups_per_step * self.group_size // UNPROVEN_SHARE),
        )

    def newest_due_version(self, policy_version: int) -> int:
        """The newest version, not above `policy_version`, that is to be published; 0 = none."""
        if policy_version == self.steps:
            return policy_version
        return policy_version - policy_version % self.publish_every

    def is_due(self, policy_version: int) -> bool:
        """Whether this version is to be published."""
        return policy_version > 0 and self.newest_due_version(policy_version) == policy_version
