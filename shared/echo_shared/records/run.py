"""Records of a run in the hub's database, in the form that the pages show.

The pages use these classes without importing the hub. Field names are those of the JSON under /api/v1/, so renaming one
breaks clients. Times are seconds since the epoch on the hub's clock. Durations end in `_s`, sizes in `_bytes`; shares
and accuracies lie in 0..1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple

FLAT: Final = MappingProxyType({"flat": True})
"""Metadata of a field whose own fields, or map entries, are merged into the enclosing JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """State of all rollouts ever leased: leased = trained + evaluated + answered + dropped + in flight."""

    leased: int = 0
    trained: int = 0
    evaluated: int = 0
    """Rollouts on held-out problems, drawn by nodes to evaluate a version."""
    answered: int = 0
    """Rollouts delivered to tenants (users of the hub's API)."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Counts by `DropReason` value."""
    in_flight: int = 0
    """Rollouts that are leased, received or scored, but not yet trained on, evaluated, answered or dropped."""

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def useful(self) -> int:
        """Number of rollouts that earn credit."""
        return self.trained + self.evaluated + self.answered

    @property
    def balanced(self) -> bool:
        return self.leased == self.useful + self.num_dropped + self.in_flight


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """An event of a run. Examples: a node has joined, the learner has died, a problem has begun."""

    ALSO_IN_JSON: ClassVar = ("warning",)

    number: int = 0
    """Assigned by the store; later events have higher numbers."""
    at: float
    kind: str = "log"
    """Kind of event, such as `node_joined`; `log`: only a log line. It has at most 32 characters."""
    severity: Severity = Severity.INFO
    subject: str = ""
    """The node or component concerned, such as a node id; at most 64 characters."""
    text: str
    data: Mapping[str, Any] = field(default_factory=dict)
    """Details in machine-readable form."""

    @property
    def warning(self) -> bool:
        """True for warnings and errors, which an operator should read."""
        return self.severity is not Severity.INFO


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Filter for events. An empty field matches any event."""

    kind: str = ""
    severity: str = ""
    """Lowest severity to include."""
    subject: str = ""
    before: int | None = None
    """Only events with a lower number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTotals:
    """Cost of all nodes that have a price."""

    dollars: float = 0.0
    active_s: float = 0.0
    """Active time, summed over all nodes that have a price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invite:
    """An invite. It admits up to `max_keys` node keys of one person, until it expires or is revoked."""

    invite_id: int = 0
    """Assigned by the store."""
    name: str
    token_hash: str
    max_keys: int
    created_at: float
    expires_at: float
    revoked_at: float | None = None


class CountedName(NamedTuple):
    """A node with rollouts that were trained on or evaluated. `invite_id` is the invite that admitted the node."""

    node_id: str
    name: str
    invite_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTotals:
    """One node that ever joined or received a lease.

    The node itself reports `name`, `backend` and `device`: treat them as hostile input.
    """

    node_id: str
    name: str
    backend: str
    device: str
    first_seen: float
    last_seen: float
    banned_at: float | None = None
    """Time of the ban; None: not banned."""
    invite: str = ""
    """Name that the operator gave to the invite that admitted the node; empty: none."""
    cost_per_hour: float = 0.0
    """Price that the node asked for when it last joined, in US dollars; 0 = donated."""
    power_watts: float = 0.0
    """Power draw that the node reports; 0 = not stated."""
    cost: float = 0.0
    """Cost of the node's active time so far, in US dollars; updated within seconds."""
    active_s: float = 0.0
    """Active time that was paid for, in seconds; 0 for donated nodes."""
    trained_rollouts: int = 0
    trained_tokens: int = 0
    evaluated_rollouts: int = 0
    """Rollouts drawn to evaluate a version."""
    answered_rollouts: int = 0
    """Rollouts delivered to tenants."""
    answered_tokens: int = 0
    share: float = 0.0
    """Fraction of all rollouts trained on, evaluated or delivered to tenants."""
    received: int = 0
    """Rollouts that arrived, whatever their final state."""
    dropped: int = 0
    others_checked: int = 0
    """Checks of other nodes' rollouts that this node made and whose result the hub confirmed."""
    others_checked_tokens: int = 0
    """Tokens that the node recomputed in confirmed checks of others' rollouts, prompts included."""
    standing: str = ""
    """The hub's verdict: new, proven, suspect or quarantined; empty: never checked."""
    standing_reason: str = ""
    """Reason why the hub's verdict is suspect or quarantined; empty for other verdicts."""
    standing_since: float = 0.0
    verified_in_a_row: int = 0
    checks: int = 0
    """Rollouts of this node whose tokens the hub recomputed."""
    failed_checks: int = 0
    last_checked: float | None = None
    """Time of the last check; None = never checked."""
    precision: str = ""
    """Precision of the engine's weights at the last check, as the node reported it; empty: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveNode:
    """A connected node: its last report, and the hub's last messages to it. The database does not store this.

    A report is a claim, only for display: no node is credited for it.
    """

    activity: str = "preparing"
    capacity: int = 0
    policy_version: int | None = None
    tokens_per_s: float = 0.0
    precision: str = ""
    """Precision of the engine's weights; empty if it is unknown or no engine runs."""
    cost_per_hour: float = 0.0
    """Cost per hour of activity, in US dollars, including electricity if the hub counts it."""
    standby: str = ""
    """Reason why the hub last put the node on standby (gave it no work); empty if the node has work or has got no
    reason yet.
    """
    affordable: bool = True
    """False if the node is on standby because of the run's spend cap."""
    num_links: int = 0
    """Number of other nodes to which this node has a link, and passes on pieces of new versions."""
    num_punched: int = 0
    """Number of these links that hole punching opened through both nodes' routers, because neither router accepts
    connections.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class NumNodes:
    """Numbers of nodes in the hub's database."""

    known: int
    """Nodes that ever joined."""
    useful: int
    """Nodes with at least one rollout trained on or evaluated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFigures:
    """One task's part of a training step, in a run with several tasks."""

    num_groups: int
    """Groups in the step's batch."""
    mean_reward: float | None = None
    """Mean reward of the episodes in the task's groups of the batch; None = the batch has no group of the task."""
    share_solved: float | None = None
    """Share of the task's episodes in the batch that have the task's highest reward; None without such episodes."""
    num_flat: int = 0
    """Groups with equal rewards, which give no gradient: those in the batch, and those dropped since the previous step.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step, which turned policy version `step` - 1 into version `step`."""

    step: int
    planned_at: float
    trained_at: float
    num_groups: int
    num_rollouts: int
    num_tokens: int
    """Number of completion tokens in the step's batch."""
    mean_reward: float
    staleness_mean: float
    """Mean staleness of the batch's groups, in steps."""
    staleness_max: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Rollouts dropped from the start of the run until this step was trained, by reason."""
    by_task: Mapping[str, TaskFigures] = field(default_factory=dict)
    """Numbers about the step by task key; empty if the run has only one task."""
    figures: Mapping[str, float | None] = field(default_factory=dict, metadata=FLAT)
    """Numbers about the step by key, as defined in `echo_shared.records.step_figures`. In JSON they are fields of the
    step.
    """
    components: Mapping[str, float] = field(default_factory=dict)
    """Mean of each component of the batch's rewards, before weighting; empty: the rewards have no components."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """One published policy version, and how it reached the nodes."""

    policy_version: int
    published_at: float
    payload_bytes: int | None = None
    """Size of the transferred payload. None in this and the next two fields: unknown."""
    carrier: str | None = None
    """Encoding of the payload: `keyframe` (it needs no other version) or `delta`."""
    way: str | None = None
    """Transport that the hub used: `inline`, `broadcast`, `swarm` or `web_seed`."""
    dissemination_p50_s: float | None = None
    """Median time from the announcement to a node's report of a complete, verified copy, on the hub's clock.

    This and the next two fields cover the nodes that were connected at the announcement.
    """
    dissemination_p95_s: float | None = None
    dissemination_max_s: float | None = None
    fetches_by_transport: Mapping[str, int] = field(default_factory=dict)
    """Number of nodes by the transport that delivered most of their bytes: `swarm`, `web_seed`, `shared_memory`,
    `inline` or `broadcast`.
    """
    bytes_by_transport: Mapping[str, int] = field(default_factory=dict)
    """Bytes by source: `swarm`, `web_seed`, `shared_memory`, `pushed` by the hub, or forwarded by other nodes (`mesh`).
    """

    @property
    def num_fetched(self) -> int:
        return sum(self.fetches_by_transport.values())


class EvaluationKind(StrEnum):
    GREEDY = "greedy"
    """One completion per problem, with the most likely token at each position."""
    SAMPLED = "sampled"
    """Several completions per problem, drawn at the run's temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Results of one policy version on the held-out problems. Only this version drew the completions."""

    name: str = ""
    """Name of the evaluation set. Empty: the results are those of the only set, or are averaged over all sets."""
    policy_version: int
    kind: EvaluationKind
    num_problems: int
    """Problems with at least one scored completion."""
    samples: int
    """Completions per problem."""
    num_unscored: int
    """Completions that the scorer failed to score; excluded from all means."""
    accuracy: float
    """Fraction of a problem's completions that solve the problem, averaged over problems (mean@k)."""
    accuracy_error: float
    """Standard error of `accuracy`."""
    pass_at: Mapping[int, float]
    """k -> probability that at least one of k completions solves a problem, for k = 2, 4, ... and `samples`."""
    mean_reward: float
    mean_tokens: float
    """Mean number of drawn tokens per completion, over all its turns."""
    share_truncated: float
    """Share of completions whose last turn reached the length limit."""
    seconds: float
    """Time that the sampling engine took; if nodes drew the completions, time from the first lease to the last
    completion.
    """
    evaluated_at: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Mean of each reward component over completions; empty: the rewards have no components."""

    @property
    def text(self) -> str:
        sampled = self.kind is EvaluationKind.SAMPLED
        how = f"mean@{self.samples}" if sampled else "greedy"
        known = f"{self.name}{': ' if self.name else ''}{how} {self.accuracy:.1%} ± {self.accuracy_error:.1%}"
        return known + "".join(f", pass@{k} {share:.1%}" for k, share in self.pass_at.items() if k == self.samples)
