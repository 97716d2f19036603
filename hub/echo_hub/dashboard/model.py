"""All that the pages read: frozen views of the run.

What the books say is shown as it is (`echo_shared.books`); a view adds what no book knows. The same dataclasses are the
JSON of /api/v1/: a field's name is a promise. Times are seconds since the epoch on the hub's clock, durations end in
`_s`, sizes in `_bytes`, shares and accuracies lie in 0..1. None = not known yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Final

from echo_shared.books import (
    FLAT,
    Accounting,
    Evaluation,
    NodeTotals,
    RunEvent,
    StepRecord,
    VersionRecord,
)
from echo_shared.health import Health, HubState
from echo_shared.node_books import TrustStatus

_PUBLIC_DIGITS: Final = 10


def public_id(node_id: str) -> str:
    """What everybody may know of a node's id."""
    return node_id[:_PUBLIC_DIGITS]


class RunState(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"


class Doing(StrEnum):
    """What a run does at this moment, or waits for."""

    STARTING = "starting"
    LEARNER_DOWN = "learner_down"
    PAUSED = "paused"
    DRAINING = "draining"
    DRAINED = "drained"
    LACKS_NODES = "lacks_nodes"
    COLLECTING = "collecting"
    TRAINING = "training"
    EVALUATING = "evaluating"
    """All is trained; the last version is measured."""
    FINISHED = "finished"


class Readiness(StrEnum):
    """Whether the hub can train."""

    STARTING = "starting"
    READY = "ready"
    FAILING = "failing"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationView:
    """How one version does on the held-out problems: greedy, and by several samples where the run asks for them."""

    greedy: Evaluation = field(metadata=FLAT)
    """In JSON its fields stand among those below, which go before."""
    samples: int = 0
    """Completions of each problem at the run's temperature; 0 = only the greedy one."""
    mean_at_k: float | None = None
    """The share of a problem's samples that solve it, mean over problems."""
    mean_at_k_error: float | None = None
    pass_at: Mapping[int, float] = field(default_factory=dict)
    """k -> the probability that one of k samples solves a problem."""
    seconds: float
    """Of the sampling engine's time, for all of it."""

    @property
    def pass_at_k(self) -> float | None:
        """The probability that one of all samples solves a problem."""
        return self.pass_at.get(self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSetView:
    """How the versions do on one of several sets of held-out problems."""

    name: str
    evaluations: tuple[EvaluationView, ...]
    """In the order of the versions."""

    @property
    def newest(self) -> EvaluationView | None:
        """None before the first."""
        return self.evaluations[-1] if self.evaluations else None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionView:
    """One published version, how it reached the nodes, and what it takes on the hub's disk."""

    record: VersionRecord = field(metadata=FLAT)
    size_bytes: int
    """Of the whole adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DisseminationView:
    """The newest announced version on its way."""

    policy_version: int
    carrier: str
    way: str
    size_bytes: int
    payload_bytes: int
    since_s: float
    """Since the announcement; from there to the last node's report once all have it."""
    num_told: int
    """Nodes that were connected at the announcement and have it, or are still there to get it."""
    num_reached: int
    """Of the nodes told: how many have it."""
    share_arrived: float
    """Of all bytes that the nodes told are to get."""

    @property
    def under_way(self) -> bool:
        return self.num_reached < self.num_told


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvisedNodes:
    """How many more nodes of a kind would keep the learner busy."""

    kind: str
    """Engine and device, as such nodes say of themselves: hostile input."""
    count: int | None
    """None: no number of them would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityView:
    """Whether the learner is kept busy: over the newest steps, and by the capacity model from what was measured."""

    window_s: float
    """What the shares below are of."""
    idle_share: float
    """Of the window, the learner trained for the rest."""
    idle_by_reason: Mapping[str, float]
    """`rollouts` that it waited for, `hand_off`, `evaluation`, `down`, `start` of the run: shares of the window."""
    step_s: float
    """A step's training and hand-off."""
    broadcast_s: float
    """From a version's training to when nodes have it."""
    predicted_utilisation: float
    """Share of the time that the learner can train with the nodes that are connected."""
    rollouts_per_s: float
    """What these nodes can return."""
    needed_per_s: float
    """What a learner takes that never waits."""
    missing_per_s: float
    """0 where the nodes are fast enough, though what they return may be too late."""
    advised_nodes: tuple[AdvisedNodes, ...]
    """Each alone would keep the learner busy."""
    advised_staleness: int | None
    """The smallest bound that would, with these nodes; None = none does, or no bound is heeded in this mode."""
    advised_interval: int | None
    """The fewest steps between two published versions that would."""
    verdict: str
    """All that in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsView:
    """The completions of one outcome among the newest rollouts, in sampled tokens."""

    outcome: str
    """`trained`, `in flight`, or the reason they were dropped for."""
    rollouts: int
    mean: float
    p10: float
    p50: float
    p90: float
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkView:
    """What became of the newest rollouts, some seconds ago at most."""

    lengths: tuple[LengthsView, ...] = ()
    """Of the newest 5,000 leased rollouts those of training that have come in."""
    groups_by_staleness: Mapping[int, int] = field(default_factory=dict)
    """How many groups of the newest steps' batches were so many steps old when they were trained."""
    steps: int = 0
    """Over how many steps that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostView:
    """What nodes cost. All money is in US dollars."""

    spend_per_hour: float
    """Of all nodes that are active now."""
    spend_cap_per_hour: float
    """What that may come to; 0 = gifts alone work."""
    total: float
    """Of the run so far, by the books: seconds behind at most."""
    active_s: float
    """The time that this is for, summed over nodes."""
    per_trained_rollout: float | None
    """The total over all rollouts that were trained on, those of gifts too; None before the first."""
    nodes_active: int
    """Connected nodes that cost something and may be leased to."""
    nodes_standing_by: int
    """Connected nodes that cost something and may not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumView:
    """Of how many problems, or tasks, it is known how well the run does on them."""

    by: str
    """problem or task."""
    solved: int
    hopeless: int
    between: int
    """Those that teach something."""
    passed_over: int
    """Problems, since the hub's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiblingView:
    """Another run of this hub."""

    run_id: str
    name: str
    address: str
    """Where people reach it; empty = it has not been served since it was made."""
    trained_step: int
    steps_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The run at one moment, `as_of`; every age on the pages is counted from it."""

    ALSO_IN_JSON: ClassVar = ("mean_reward", "staleness_mean", "staleness_max", "accuracy_before", "accuracy_after")

    as_of: float
    run_id: str
    name: str
    mode: str
    task: str
    base_model: str
    join_command: str
    """The one line with which a volunteer joins, this hub's address in it."""
    state: RunState
    state_detail: str = ""
    """What it does, or waits for, in words."""
    doing: Doing = Doing.TRAINING
    """The same for programs."""
    health: Health = field(default_factory=lambda: Health(state=HubState.READY))
    """The hub's state in a word, and why it is no better one."""
    install_command: str = ""
    """The one line that installs a node from this hub and joins; empty where the operator does not offer it."""
    windows_install_command: str = ""
    """The same for PowerShell."""
    address: str = ""
    """The hub's, that stands in these lines."""
    problems: tuple[str, ...] = ()
    """What is broken, for the operator, and the alarms."""
    alarms: tuple[str, ...] = ()
    """Those of the problems that the hub goes on after by itself."""
    problem_kinds: tuple[str, ...] = ()
    """Kinds of the problems that the hub watches for and has found."""
    starting: bool = False
    """The hub is not up yet: nodes may join, and nothing is trained."""
    started_at: float
    finished_at: float | None = None
    steps_total: int
    first_version: int = 0
    """What the run began with; 0 = the base."""
    lineage: tuple[str, ...] = ()
    """Where that comes from, in words, the nearest first."""
    trained_step: int = 0
    published_version: int = 0
    group_size: int
    max_staleness: int
    leasing: str = "open"
    """open, paused, draining or drained, as the operator has said."""
    live: Mapping[str, float] = field(default_factory=dict)
    """The settings that operators may change while the run goes on, as they are now."""
    newest_step: StepRecord | None = None
    """None before the first is trained."""
    rollouts_per_s: float = 0.0
    """Received, over the last minute or so."""
    rollouts_gone_on: int = 0
    """Received since the hub's start, and begun on another node or before their node's restart."""
    tokens_saved: int = 0
    """Of these, that were not drawn again."""
    turned_away: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Since the hub's start, by what it was (a connection, a node, a frame) and why."""
    curriculum: CurriculumView | None = None
    """None where problems are taken as they come."""
    judged: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """What each judge of rewards has been asked since the hub's start: calls, unanswered, without_verdict,
    tokens_read, tokens_written."""
    buffered_groups: int = 0
    """Complete, scored, and waiting for the learner."""
    accounting: Accounting = field(default_factory=Accounting)
    evaluations: tuple[EvaluationView, ...] = ()
    """In the order of their versions; of many, some between are left out. Where there are several sets of held-out
    problems, their weighted mean."""
    evaluation_sets: tuple[EvaluationSetView, ...] = ()
    """Each of several sets."""
    tasks: tuple[str, ...] = ()
    """The keys of the tasks that are trained on, where there are several."""
    versions: tuple[VersionView, ...] = ()
    """Newest first; old ones may be left out."""
    fetches_by_transport: Mapping[str, int] = field(default_factory=dict)
    """Over all versions and nodes."""
    dissemination: DisseminationView | None = None
    newest_complete: int | None = None
    """The newest version that every node has that was told of it, or a newer one."""
    """None before the hub has announced a version since its start."""
    nodes_on_newest: int = 0
    """Connected nodes that hold the newest published version."""
    nodes_connected: int = 0
    nodes_known: int = 0
    """That ever joined: more than the pages list."""
    nodes_useful: int = 0
    """Of whose rollouts some were trained on or evaluated."""
    uplink_bytes_s: float | None = None
    """What the hub can send, as set or measured."""
    events: tuple[RunEvent, ...] = ()
    """Newest first; old ones may be left out."""
    capacity: CapacityView | None = None
    """None before the first step."""
    work: WorkView = field(default_factory=WorkView)
    cost: CostView | None = None
    """None while no node costs anything, and none has."""
    trust: TrustStatus = field(default_factory=TrustStatus)
    siblings: tuple[SiblingView, ...] = ()
    """Other runs of this hub, by name."""

    @property
    def broken(self) -> bool:
        """Whether any of the problems is more than an alarm."""
        return len(self.problems) > len(self.alarms)

    @property
    def readiness(self) -> Readiness:
        if self.broken:
            return Readiness.FAILING
        return Readiness.STARTING if self.starting else Readiness.READY

    @property
    def mean_reward(self) -> float | None:
        """Of the newest trained step."""
        return self.newest_step.mean_reward if self.newest_step else None

    @property
    def staleness_mean(self) -> float | None:
        """Of the newest trained step."""
        return self.newest_step.staleness_mean if self.newest_step else None

    @property
    def staleness_max(self) -> int | None:
        """Of the newest trained step."""
        return self.newest_step.staleness_max if self.newest_step else None

    @property
    def beginning(self) -> str:
        """What the run began with."""
        return f"version {self.first_version}" if self.first_version else "the base model"

    @property
    def accuracy_before(self) -> float | None:
        """Held-out accuracy of what the run began with, most often the base model."""
        first = self.first_version
        return next((e.greedy.accuracy for e in self.evaluations if e.greedy.policy_version == first), None)

    @property
    def accuracy_after(self) -> float | None:
        """Held-out accuracy of the newest version that was evaluated."""
        first = self.first_version
        return next((e.greedy.accuracy for e in reversed(self.evaluations) if e.greedy.policy_version > first), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node that has ever joined: what it did, by the books, and what it does, by its own last report."""

    ALSO_IN_JSON: ClassVar = ("banned", "trained", "evaluated")

    totals: NodeTotals = field(metadata=FLAT)
    connected: bool
    activity: str
    """As it last reported: preparing, waiting, fetching, sampling, paused, draining; empty = it is away."""
    policy_version: int | None
    """Newest it can sample from."""
    capacity: int
    in_flight: int
    """Rollouts leased to it and not yet received."""
    tokens_per_s: float
    precision: str = ""
    """Of its engine's weights, as it says, or said when it was last checked; empty = not known."""
    costs_per_hour: float = 0.0
    """What it costs while it is active, in US dollars, its power included where the hub counts that."""
    standby: str = ""
    """Why it has no work, as it was told; empty = it was told nothing."""

    @property
    def banned(self) -> bool:
        return self.totals.banned_at is not None

    @property
    def trained(self) -> int:
        """How many of its rollouts were trained on."""
        return self.totals.trained_rollouts

    @property
    def evaluated(self) -> int:
        """How many of its rollouts an evaluation used."""
        return self.totals.evaluated_rollouts


@dataclass(frozen=True, slots=True, eq=False)
class NodesAway:
    """Nodes that are away and hold nothing. The same object as long as nothing of any of them changes: what is made of
    it may be kept."""

    by_id: Mapping[str, NodeView]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All nodes that the pages know of."""

    here: Mapping[str, NodeView]
    """By their ids those that are connected, or hold rollouts."""
    away: NodesAway

    def __iter__(self) -> Iterator[NodeView]:
        yield from self.here.values()
        yield from self.away.by_id.values()

    def __len__(self) -> int:
        return len(self.here) + len(self.away.by_id)

    def get(self, node_id: str) -> NodeView | None:
        return self.here.get(node_id) or self.away.by_id.get(node_id)
