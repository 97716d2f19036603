"""What the coordinator is told of the run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, Literal

from echo_hub.core.activation.settings import ActivationSettings
from echo_hub.core.curriculum import CurriculumSettings
from echo_hub.core.mixture import Mixture, TrainedTask
from echo_hub.core.nodes.node import NodeSettings, Samplers
from echo_hub.core.nodes.strangers import UNPROVEN_SHARE
from echo_hub.core.trust.settings import TrustSettings

Mode = Literal["colocated", "sequential", "async"]
LEASING: Final = ("open", "paused", "draining")
"""What an operator may have said of leasing."""

_SAMPLERS: Final[dict[Mode, Samplers]] = {"colocated": "hub", "sequential": "any", "async": "by_version"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """`interval` is at most `max_staleness` + 1 in async mode, and 1 in sequential mode: else no lease is fresh enough
    to be consumed. In any other mode than async the staleness bound is 0, whatever `max_staleness` says."""

    mode: Mode
    steps: int
    groups_per_step: int
    group_size: int
    deadline_s: float
    max_staleness: int = 0
    publish_every: int = 1
    publish_changes: tuple[tuple[int, int], ...] = ()
    """Version and interval, ascending: that version is published, and from it on one every so many steps, until the
    next of these. Before the first, `publish_every` holds."""
    learning_rate: float = 0.0
    learning_rates: tuple[tuple[int, float], ...] = ()
    """Step and rate, ascending: the rate holds from that step on. Before the first, `learning_rate` does."""
    objective: str = "{}"
    """What a step minimises, as JSON that only the learner reads."""
    objectives: tuple[tuple[int, str], ...] = ()
    """Step and objective, ascending: it holds from that step on. Before the first, `objective` does."""
    change_objective: Callable[[str, str], tuple[str, str, str]] | None = None
    """Of an objective and what an operator wants of it: the new one, and what of it was and is, in words. Raises
    ValueError where that does not fit the run. None: it does not change."""
    leasing: str = "open"
    """open; paused: nothing is leased; draining: no group is opened, and what is open is leased until it is complete.
    Whatever is leased comes in, and the learner trains what is complete."""
    interrupts: bool = False
    """Nodes go on by newer versions in mid-completion; only in async mode."""
    multi_turn: bool = False
    """Episodes may have several turns."""
    dynamic_sampling: bool = False
    """A group whose rewards are all equal is dropped and another is sampled in its place."""
    curriculum: CurriculumSettings | None = None
    """Problems whose pass rate is known to teach nothing are passed over; None: each is taken as it comes."""
    discount: float | None = None
    """Of the returns by which the learner gives each turn an advantage of its own; None: one to each episode."""
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
    evaluation_ends: tuple[tuple[int, int], ...] = ()
    """With several evaluation sets: where each ends in the row of all held-out problems, ascending, and its own
    completions of each; none = `evaluation_samples` of all."""
    mixture: Mixture | None = None
    """Where the run has several tasks: which groups are for which of `tasks`."""
    tasks: tuple[TrainedTask, ...] = ()
    """In the mixture's order."""
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

    @property
    def interval(self) -> int:
        """Steps between published versions, from the next change on at the latest."""
        return self.publish_changes[-1][1] if self.publish_changes else self.publish_every

    def evaluation_samples_of(self, number: int) -> int:
        """Completions of held-out problem `number` at the run's temperature."""
        at = bisect_right(self.evaluation_ends, number, key=itemgetter(0))
        return self.evaluation_ends[at][1] if at < len(self.evaluation_ends) else self.evaluation_samples

    def learning_rate_of(self, step: int) -> float:
        """What step `step` is trained at."""
        at = bisect_right(self.learning_rates, step, key=itemgetter(0))
        return self.learning_rates[at - 1][1] if at else self.learning_rate

    def objective_of(self, step: int) -> str:
        """What step `step` minimises."""
        at = bisect_right(self.objectives, step, key=itemgetter(0))
        return self.objectives[at - 1][1] if at else self.objective

    def newest_due_version(self, policy_version: int) -> int:
        """The newest version, not above `policy_version`, that is to be published; 0 = none."""
        if policy_version == self.steps:
            return policy_version
        at = bisect_right(self.publish_changes, policy_version, key=itemgetter(0))
        first, every = self.publish_changes[at - 1] if at else (0, self.publish_every)
        return policy_version - (policy_version - first) % every

    def is_due(self, policy_version: int) -> bool:
        """Whether this version is to be published."""
        return policy_version > 0 and self.newest_due_version(policy_version) == policy_version
