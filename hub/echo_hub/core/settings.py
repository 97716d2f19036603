"""Settings of the coordinator."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, Literal

from echo_hub.core.accounting.parameters import RulesOfGroups, SessionRules
from echo_hub.core.activation.settings import ActivationSettings
from echo_hub.core.nodes.node import NodeSettings, Samplers
from echo_hub.core.nodes.strangers import UNPROVEN_SHARE
from echo_hub.core.policy.curriculum import CurriculumSettings
from echo_hub.core.policy.mixture import Mixture, TrainedTask
from echo_hub.core.tenant_names import TenantNames
from echo_hub.core.trust.settings import TrustSettings

Mode = Literal["colocated", "sequential", "async"]
LEASING: Final = ("open", "paused", "draining")
"""States of leasing that an operator may set."""

_SAMPLERS: Final[dict[Mode, Samplers]] = {"colocated": "hub", "sequential": "any", "async": "by_version"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """Settings of one run.

    In async mode `interval` is at most `max_staleness` + 1, and in sequential mode it is 1. Otherwise no lease would be
    fresh enough. In modes other than async the staleness bound is 0, and `max_staleness` is ignored.
    """

    mode: Mode
    steps: int
    groups_per_step: int
    group_size: int
    deadline_s: float
    max_staleness: int = 0
    publish_every: int = 1
    publish_changes: tuple[tuple[int, int], ...] = ()
    """Pairs (version, interval), ascending. From that version on, that version and then every interval-th version is
    published, until the next pair applies.

    Before the first pair, `publish_every` is the interval.
    """
    learning_rate: float = 0.0
    learning_rates: tuple[tuple[int, float], ...] = ()
    """Pairs of step and rate, ascending: the rate applies from that step on. Before the first pair, `learning_rate`
    does."""
    objective: str = "{}"
    """Objective as JSON, which only the learner reads."""
    objectives: tuple[tuple[int, str], ...] = ()
    """Pairs of step and objective, ascending: the objective applies from that step on. Before the first pair,
    `objective` does."""
    change_objective: Callable[[str, str], tuple[str, str, str]] | None = None
    """Function that applies an operator's request to the current objective. Arguments: current objective and request.

    It returns the new objective, and the changed part before and after, in words. It raises ValueError for an
    unsuitable request. None: the objective is fixed.
    """
    trains: bool = True
    """False if the run has no task of its own: no groups are opened for training, and the run never ends."""
    leasing: str = "open"
    """State of leasing: open; paused: no leases; draining: no new groups, but open ones are leased until complete.

    In every state, leased rollouts are received and complete groups are trained.
    """
    interrupts: bool = False
    """True if nodes may switch to a newer version in the middle of a completion; only in async mode."""
    multi_turn: bool = False
    """True if episodes of the run's tasks may have several turns."""
    dynamic_sampling: bool = False
    """True if groups with equal rewards are dropped and replaced."""
    curriculum: CurriculumSettings | None = None
    """Rule for skipping problems by their pass rate; None: use every problem."""
    discount: float | None = None
    """Discount of the returns that give each turn its own advantage; None: one advantage per episode."""
    tokens_per_step: int = 0
    """Token budget of a step: groups are added until their sampled tokens reach it; 0 = `groups_per_step` groups."""
    first_window: int = 4
    """Rollouts that an unproven node (without any scored rollout) may hold while no node is proven. The node must earn
    a larger number by returning work."""
    run_seed: int = 0
    """Seed of the evaluations' samples. Training groups bring their own seeds."""
    evaluation_problems: int = 0
    """Number of held-out problems for evaluation by nodes; 0 = no evaluation by nodes."""
    evaluation_samples: int = 0
    """Completions of each held-out problem at the run's temperature, besides the greedy one."""
    evaluation_ends: tuple[tuple[int, int], ...] = ()
    """Pairs of end position in the list of held-out problems and number of sampled completions per problem: one pair
    for each evaluation set, ascending. Empty: `evaluation_samples` applies to all problems."""
    mixture: Mixture | None = None
    """Assignment of groups to `tasks`, for a run with several tasks."""
    tasks: tuple[TrainedTask, ...] = ()
    """Tasks in the mixture's order."""
    session_rules: RulesOfGroups | None = None
    """Rules of the groups whose episodes are sessions; None: there are no sessions."""
    activation: ActivationSettings = field(default_factory=ActivationSettings)
    """Settings for choosing the active nodes, which the operator pays."""
    tenant_names: TenantNames = field(default_factory=TenantNames)
    """Names of tenants as nodes see them."""
    trust: TrustSettings = field(default_factory=TrustSettings)
    """Settings for the checks of nodes' rollouts; checks are disabled in co-located mode."""

    @property
    def staleness_bound(self) -> int:
        return self.max_staleness if self.mode == "async" else 0

    @property
    def nodes(self) -> NodeSettings:
        return NodeSettings(
            samplers=_SAMPLERS[self.mode],
            lease_size=1 if self.multi_turn else self.group_size,
            deadline_s=self.deadline_s,
            first_window=self.first_window,
            unproven_most=max(self.first_window, self.groups_per_step * self.group_size // UNPROVEN_SHARE),
        )

    @property
    def interval(self) -> int:
        """Return the newest publication interval (steps between published versions), after operators' changes. It may
        apply only from a later version on.
        """
        return self.publish_changes[-1][1] if self.publish_changes else self.publish_every

    def evaluation_samples_of(self, number: int) -> int:
        """Return the number of sampled completions of held-out problem `number`, at the run's temperature."""
        at = bisect_right(self.evaluation_ends, number, key=itemgetter(0))
        return self.evaluation_ends[at][1] if at < len(self.evaluation_ends) else self.evaluation_samples

    def session_of(self, group_id: int) -> SessionRules | None:
        """Return the rules of a training or evaluation group's sessions; None: the group has no sessions."""
        return self.session_rules(group_id) if self.session_rules is not None else None

    def learning_rate_of(self, step: int) -> float:
        at = bisect_right(self.learning_rates, step, key=itemgetter(0))
        return self.learning_rates[at - 1][1] if at else self.learning_rate

    def objective_of(self, step: int) -> str:
        at = bisect_right(self.objectives, step, key=itemgetter(0))
        return self.objectives[at - 1][1] if at else self.objective

    def newest_due_version(self, policy_version: int) -> int:
        """Return the newest version due for publication, up to `policy_version`; 0 = none."""
        if policy_version == self.steps:
            return policy_version
        at = bisect_right(self.publish_changes, policy_version, key=itemgetter(0))
        first, every = self.publish_changes[at - 1] if at else (0, self.publish_every)
        return policy_version - (policy_version - first) % every

    def is_due(self, policy_version: int) -> bool:
        return policy_version > 0 and self.newest_due_version(policy_version) == policy_version
