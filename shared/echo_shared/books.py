"""What the hub's books say of a run: its store counts these records, its pages show them as they are.

They are here because the pages import nothing of the hub. Their fields are those of the JSON of /api/v1/: a name is a
promise. Times are seconds since the epoch on the hub's clock, durations end in `_s`, sizes in `_bytes`, shares and
accuracies lie in 0..1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple

FLAT: Final = MappingProxyType({"flat": True})
"""Marks a field whose own fields, or items, are those of the object around it in JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """Where every rollout ever leased is now: leased = trained + evaluated + dropped + in flight."""

    leased: int = 0
    trained: int = 0
    evaluated: int = 0
    """By nodes, on held-out problems."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """By `DropReason` value."""
    in_flight: int = 0
    """Leased, received or scored, and not yet trained on or evaluated."""

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def balanced(self) -> bool:
        return self.leased == self.trained + self.evaluated + self.num_dropped + self.in_flight


class Severity(StrEnum):
    """How much an event matters."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """Something that has happened in a run: a node joined, the learner died, a problem began."""

    ALSO_IN_JSON: ClassVar = ("warning",)

    number: int = 0
    """The store gives it: later events have greater ones."""
    at: float
    kind: str = "log"
    """`node_joined` and the like; `log` = nothing but a line of the log. Up to 32 characters."""
    severity: Severity = Severity.INFO
    subject: str = ""
    """Whom it concerns, such as a node's id; up to 64 characters."""
    text: str
    data: Mapping[str, Any] = field(default_factory=dict)
    """More of it, for programs."""

    @property
    def warning(self) -> bool:
        """Whether an operator should look at it."""
        return self.severity is not Severity.INFO


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Which events are asked for; empty = any."""

    kind: str = ""
    severity: str = ""
    """At least this one."""
    subject: str = ""
    before: int | None = None
    """Of lower numbers than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTotals:
    """What all nodes together have cost while they were active."""

    dollars: float = 0.0
    active_s: float = 0.0
    """Summed over the nodes that cost something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invite:
    """What admits one person's nodes: as many keys as it says, until it expires or is revoked."""

    invite_id: int = 0
    """The store gives it."""
    name: str
    token_hash: str
    max_keys: int
    created_at: float
    expires_at: float
    revoked_at: float | None = None


class CountedName(NamedTuple):
    """The name of a node whose work has counted. `invite_id`: of the invite that it came by."""

    node_id: str
    name: str
    invite_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTotals:
    """One node that ever joined or was leased to. `name`, `backend` and `device` are what it says of itself: hostile
    input."""

    node_id: str
    name: str
    backend: str
    device: str
    first_seen: float
    last_seen: float
    banned_at: float | None = None
    """None = it may take part."""
    invite: str = ""
    """Whose invite it came by, as the operator named that; empty = it came by none."""
    cost_per_hour: float = 0.0
    """What it asked for when it joined last, in US dollars; 0 = it is a gift."""
    power_watts: float = 0.0
    """What it says that it draws; 0 = not stated."""
    cost: float = 0.0
    """What it has cost while it was active, in US dollars, by the books: seconds behind at most."""
    active_s: float = 0.0
    """The time that this is for; of gifts it is not kept."""
    trained_rollouts: int = 0
    trained_tokens: int = 0
    evaluated_rollouts: int = 0
    """Drawn to see how good a version is."""
    share: float = 0.0
    """Of all rollouts that were trained on or evaluated."""
    received: int = 0
    """Rollouts that came in, whatever became of them."""
    dropped: int = 0
    others_checked: int = 0
    """Rollouts of others that it has computed again, and whose finding stands."""
    others_checked_tokens: int = 0
    """Those of the prompts included."""
    standing: str = ""
    """What the hub thinks of it: new, proven, suspect, quarantined; empty = nothing of it was ever checked."""
    standing_reason: str = ""
    """Why it is suspect or quarantined."""
    standing_since: float = 0.0
    verified_in_a_row: int = 0
    checks: int = 0
    """Rollouts of which the hub has computed again what this node drew."""
    failed_checks: int = 0
    last_checked: float | None = None
    """None = never."""
    precision: str = ""
    """Of its engine's weights when it was last checked, as it said; empty = not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumNodes:
    """How many there are in the books."""

    known: int
    """That ever joined."""
    useful: int
    """Of whose rollouts some were trained on or evaluated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFigures:
    """What a step took of one of several tasks."""

    num_groups: int
    """In its batch."""
    mean_reward: float | None = None
    """Of the episodes of these; None: there are none."""
    share_solved: float | None = None
    """Of them: the share with the task's highest reward."""
    num_flat: int = 0
    """Groups whose rewards are all equal, which teach nothing: those in the batch, and those that were dropped for it
    since the step before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One trained step. It turned version `step` - 1 into `step`."""

    step: int
    planned_at: float
    trained_at: float
    num_groups: int
    num_rollouts: int
    num_tokens: int
    """Of the completions."""
    mean_reward: float
    staleness_mean: float
    """Over groups."""
    staleness_max: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Rollouts dropped before the step was trained, from the first day on, by reason."""
    by_task: Mapping[str, TaskFigures] = field(default_factory=dict)
    """By the key of the task; empty where the run has one task alone."""
    figures: Mapping[str, float | None] = field(default_factory=dict, metadata=FLAT)
    """All of `echo_shared.step_figures` by their keys. In JSON they stand among the step's other fields."""
    components: Mapping[str, float] = field(default_factory=dict)
    """The mean of each component of the batch's rewards, before it is weighed; empty: they are the task's score
    alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """One published version, and how it reached the nodes."""

    policy_version: int
    published_at: float
    payload_bytes: int | None = None
    """Of what travelled in the adapter's place; None when it is not known, as are the next two."""
    carrier: str | None = None
    """`keyframe` or `delta`."""
    way: str | None = None
    """How the hub sent it: `inline`, `broadcast`, `swarm` or `web_seed`."""
    dissemination_p50_s: float | None = None
    """From the announcement to the node's report that its copy is complete and intact, on the hub's clock, as are the
    two below; over the nodes that were connected at the announcement."""
    dissemination_p95_s: float | None = None
    dissemination_max_s: float | None = None
    fetches_by_transport: Mapping[str, int] = field(default_factory=dict)
    """How many nodes fetched it, each by where most of its bytes came from: `swarm`, `web_seed`, `shared_memory`,
    `inline` or `broadcast`."""
    bytes_by_transport: Mapping[str, int] = field(default_factory=dict)
    """From `swarm`, `web_seed`, `shared_memory`, from the hub's hand (`pushed`) and handed on by nodes (`mesh`)."""

    @property
    def num_fetched(self) -> int:
        return sum(self.fetches_by_transport.values())


class EvaluationKind(StrEnum):
    GREEDY = "greedy"
    """The most likely completion, token by token."""
    SAMPLED = "sampled"
    """Several at the run's temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How one version does on the held-out problems, all completions by exactly this version."""

    name: str = ""
    """Of its evaluation set; empty for the run's own figures: those of its only set, or the mean of all."""
    policy_version: int
    kind: EvaluationKind
    num_problems: int
    """Those with a scored completion."""
    samples: int
    """Completions of each problem."""
    num_unscored: int
    """Completions on which the scorer failed; they count in no mean."""
    accuracy: float
    """The share of a problem's completions that solve it, mean over problems: mean@k."""
    accuracy_error: float
    """Its standard error."""
    pass_at: Mapping[int, float]
    """k -> the probability that one of k completions solves a problem, for k = 2, 4, ... and `samples`."""
    mean_reward: float
    mean_tokens: float
    """Drawn tokens of a completion, over all turns."""
    share_truncated: float
    """Of the completions: cut off by length in their last turn."""
    seconds: float
    """Of the sampling engine's time; by nodes, from the first lease to the last completion."""
    evaluated_at: float
    components: Mapping[str, float] = field(default_factory=dict)
    """The mean of each component of the rewards, over completions; empty: they are the task's score alone."""

    @property
    def text(self) -> str:
        """greedy 92.4% ± 1.2%; of several samples mean@8 91.0% ± 1.0%, pass@8 97.1%"""
        sampled = self.kind is EvaluationKind.SAMPLED
        how = f"mean@{self.samples}" if sampled else "greedy"
        known = f"{self.name}{': ' if self.name else ''}{how} {self.accuracy:.1%} ± {self.accuracy_error:.1%}"
        return known + "".join(f", pass@{k} {share:.1%}" for k, share in self.pass_at.items() if k == self.samples)
