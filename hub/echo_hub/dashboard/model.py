"""All data that the pages read: frozen views of the run.

Stored figures are shown as they are (`echo_shared.records.run`); a view adds live figures that are not stored. The same
dataclasses are the JSON of /api/v1/, so field names must not change. Times are seconds since the epoch on the hub's
clock. Durations end in `_s`, sizes in `_bytes`; shares and accuracies are in 0..1. None means not known yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Final

from echo_shared.records.health import Health, HubState
from echo_shared.records.node import TrustStatus
from echo_shared.records.run import (
    FLAT,
    Accounting,
    Evaluation,
    NodeTotals,
    RunEvent,
    StepRecord,
    VersionRecord,
)

_PUBLIC_DIGITS: Final = 10


def public_id(node_id: str) -> str:
    """Return the prefix of a node's id that is public."""
    return node_id[:_PUBLIC_DIGITS]


class RunState(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"


class Doing(StrEnum):
    """The run's current activity, or the reason why it waits."""

    STARTING = "starting"
    LEARNER_DOWN = "learner_down"
    PAUSED = "paused"
    DRAINING = "draining"
    DRAINED = "drained"
    LACKS_NODES = "lacks_nodes"
    COLLECTING = "collecting"
    TRAINING = "training"
    EVALUATING = "evaluating"
    """All steps are trained; the last version is being evaluated."""
    FINISHED = "finished"


class Readiness(StrEnum):
    """Readiness of the hub to train."""

    STARTING = "starting"
    READY = "ready"
    FAILING = "failing"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationView:
    """One version's results on the held-out problems: greedy, and with several samples if the run asks for them."""

    greedy: Evaluation = field(metadata=FLAT)
    """In JSON these fields stand among the ones below, which take precedence."""
    samples: int = 0
    """Completions of each problem at the run's temperature; 0 means greedy only."""
    mean_at_k: float | None = None
    """Share of a problem's samples that solve it, averaged over problems."""
    mean_at_k_error: float | None = None
    pass_at: Mapping[int, float] = field(default_factory=dict)
    """Maps k to the probability that at least one of k samples solves a problem."""
    seconds: float
    """Sampling time of the whole evaluation."""

    @property
    def pass_at_k(self) -> float | None:
        """Probability that at least one of all samples solves a problem."""
        return self.pass_at.get(self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSetView:
    """Results of all versions on one of several held-out sets."""

    name: str
    evaluations: tuple[EvaluationView, ...]
    """In the order of versions."""

    @property
    def newest(self) -> EvaluationView | None:
        """The newest evaluation; None before the first."""
        return self.evaluations[-1] if self.evaluations else None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionView:
    """One published version, its distribution to nodes, and its size on the hub's disk."""

    record: VersionRecord = field(metadata=FLAT)
    size_bytes: int
    """Size of the whole adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DisseminationView:
    """Distribution of the newest announced version."""

    policy_version: int
    carrier: str
    way: str
    size_bytes: int
    payload_bytes: int
    since_s: float
    """Seconds since the announcement. Once all nodes have it: seconds from the announcement to the last node's
    report."""
    num_told: int
    """Nodes told at the announcement. Nodes that left without the version are not counted."""
    num_reached: int
    """Nodes among `num_told` that have the version."""
    share_arrived: float
    """Share of all bytes that these nodes need which has arrived."""

    @property
    def under_way(self) -> bool:
        return self.num_reached < self.num_told


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvisedNodes:
    """Number of nodes of one kind to add so that the learner stays busy."""

    kind: str
    """Engine and device as reported by such nodes: untrusted text."""
    count: int | None
    """None if no number of them is enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityView:
    """How busy the learner is, as measured over the newest steps, and as the capacity model predicts."""

    window_s: float
    """Duration that the shares below refer to."""
    idle_share: float
    """Share of the window without training."""
    idle_by_reason: Mapping[str, float]
    """Idle time by reason, as shares of the window: waiting for `rollouts`, `hand_off`, `evaluation`, learner
    `down`, `start` of the run."""
    step_s: float
    """Seconds of one step's training and hand-off."""
    broadcast_s: float
    """Seconds from a version's training until nodes have it."""
    predicted_utilisation: float
    """Share of time the learner can train, given the connected nodes."""
    rollouts_per_s: float
    """Rollouts that the connected nodes can return."""
    needed_per_s: float
    """Rollouts that a learner without waits consumes."""
    missing_per_s: float
    """0 if the nodes are fast enough; their rollouts may still arrive too late."""
    advised_nodes: tuple[AdvisedNodes, ...]
    """Each entry alone would keep the learner busy."""
    advised_staleness: int | None
    """Smallest staleness bound that would keep the learner busy with these nodes. None if no bound does, or if the
    mode ignores it."""
    advised_interval: int | None
    """Smallest number of steps between published versions that would keep the learner busy."""
    verdict: str
    """A summary in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsView:
    """Lengths of one outcome's completions among the newest rollouts, in sampled tokens."""

    outcome: str
    """`trained`, `in flight` or the drop reason."""
    rollouts: int
    mean: float
    p10: float
    p50: float
    p90: float
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkView:
    """Outcomes and ages of the newest rollouts, at most some seconds old."""

    lengths: tuple[LengthsView, ...] = ()
    """Received training completions among the newest 5,000 leased rollouts."""
    groups_by_staleness: Mapping[int, int] = field(default_factory=dict)
    """Number of groups by their staleness when trained, over the newest steps' batches."""
    steps: int = 0
    """Number of steps that this covers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostView:
    """Costs of nodes, in US dollars."""

    spend_per_hour: float
    """Hourly cost of all active nodes."""
    spend_cap_per_hour: float
    """Upper limit of the hourly cost; 0 means that only free nodes work."""
    total: float
    """Cost of the run so far, from the store: at most seconds behind."""
    active_s: float
    """Active seconds that were paid for, summed over nodes."""
    per_trained_rollout: float | None
    """Total cost divided by all trained rollouts, including those of free nodes; None before the first."""
    nodes_active: int
    """Connected nodes with a price that may get leases."""
    nodes_standing_by: int
    """Connected nodes with a price that may not get leases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumView:
    """Number of problems, or tasks, by their newest pass rate."""

    by: str
    """"problem" or "task"."""
    solved: int
    hopeless: int
    between: int
    """Those with some success: they give a training signal."""
    passed_over: int
    """Problems that the curriculum left out since the hub's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiblingView:
    """Another run of the same hub."""

    run_id: str
    name: str
    address: str
    """Address for people; empty if the run was never served."""
    trained_step: int
    steps_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The run at the time `as_of`. The pages compute all ages from it."""

    ALSO_IN_JSON: ClassVar = ("mean_reward", "staleness_mean", "staleness_max", "accuracy_before", "accuracy_after")

    as_of: float
    run_id: str
    name: str
    mode: str
    task: str
    base_model: str
    join_command: str
    """Command for volunteers to join, with this hub's address."""
    state: RunState
    state_detail: str = ""
    """Current activity, or the reason for waiting, in words."""
    doing: Doing = Doing.TRAINING
    """The same for programs."""
    health: Health = field(default_factory=lambda: Health(state=HubState.READY))
    """The hub's health: its state in a word, and the reasons against a better state."""
    install_command: str = ""
    """Command that installs a node from this hub and joins; empty if the operator does not offer it."""
    windows_install_command: str = ""
    """The same for PowerShell."""
    address: str = ""
    """The hub's address, used in these commands."""
    problems: tuple[str, ...] = ()
    """Everything that is broken, for the operator, including the alarms."""
    alarms: tuple[str, ...] = ()
    """Problems from which the hub tries to recover by itself."""
    problem_kinds: tuple[str, ...] = ()
    """Kinds of the problems found by the hub's monitoring."""
    starting: bool = False
    """True while the hub starts: nodes may join, and nothing is trained."""
    started_at: float
    finished_at: float | None = None
    steps_total: int
    first_version: int = 0
    """Version at the run's start; 0 is the base model."""
    lineage: tuple[str, ...] = ()
    """Origins of the first version in words, nearest first."""
    trained_step: int = 0
    published_version: int = 0
    group_size: int
    max_staleness: int
    leasing: str = "open"
    """open, paused, draining or drained, as set by the operator."""
    live: Mapping[str, float] = field(default_factory=dict)
    """Current values of the settings that operators may change during the run."""
    newest_step: StepRecord | None = None
    """None before the first trained step."""
    rollouts_per_s: float = 0.0
    """Rate of received rollouts over about the last minute."""
    rollouts_gone_on: int = 0
    """Rollouts received since the hub's start that were resumed from another node or after their node's restart."""
    tokens_saved: int = 0
    """Tokens of these rollouts that were not sampled again."""
    turned_away: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Refusals since the hub's start, by kind (connection, node, frame) and reason."""
    curriculum: CurriculumView | None = None
    """None if the run has no curriculum."""
    judged: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Counts for each reward judge since the hub's start: calls, unanswered, without_verdict, tokens_read,
    tokens_written."""
    buffered_groups: int = 0
    """Complete, scored groups that wait for the learner."""
    accounting: Accounting = field(default_factory=Accounting)
    evaluations: tuple[EvaluationView, ...] = ()
    """In the order of versions; if there are many, some are left out. With several held-out sets, their weighted
    mean."""
    evaluation_sets: tuple[EvaluationSetView, ...] = ()
    """One entry for each of several held-out sets."""
    tasks: tuple[str, ...] = ()
    """Keys of the training tasks, if there are several."""
    versions: tuple[VersionView, ...] = ()
    """Newest first; old ones may be left out."""
    fetches_by_transport: Mapping[str, int] = field(default_factory=dict)
    """Number of fetches over all versions and nodes."""
    dissemination: DisseminationView | None = None
    """None before the hub has announced a version since its start."""
    newest_complete: int | None = None
    """Newest version that every node told of it has, counting nodes that have a newer version."""
    nodes_on_newest: int = 0
    """Connected nodes that hold the newest published version."""
    nodes_connected: int = 0
    nodes_known: int = 0
    """Nodes that ever joined; the pages may list fewer."""
    nodes_useful: int = 0
    """Nodes with any rollout trained on or evaluated."""
    uplink_bytes_s: float | None = None
    """The hub's uplink, as configured or measured."""
    events: tuple[RunEvent, ...] = ()
    """Newest first; old ones may be left out."""
    capacity: CapacityView | None = None
    """None before the first step."""
    work: WorkView = field(default_factory=WorkView)
    cost: CostView | None = None
    """None if no node has or had a price."""
    trust: TrustStatus = field(default_factory=TrustStatus)
    siblings: tuple[SiblingView, ...] = ()
    """Other runs of this hub, by name."""

    @property
    def broken(self) -> bool:
        """True if any problem is more than an alarm."""
        return len(self.problems) > len(self.alarms)

    @property
    def readiness(self) -> Readiness:
        if self.broken:
            return Readiness.FAILING
        return Readiness.STARTING if self.starting else Readiness.READY

    @property
    def mean_reward(self) -> float | None:
        """Mean reward of the newest trained step."""
        return self.newest_step.mean_reward if self.newest_step else None

    @property
    def staleness_mean(self) -> float | None:
        """Mean staleness of the newest trained step."""
        return self.newest_step.staleness_mean if self.newest_step else None

    @property
    def staleness_max(self) -> int | None:
        """Largest staleness of the newest trained step."""
        return self.newest_step.staleness_max if self.newest_step else None

    @property
    def beginning(self) -> str:
        """The run's first version, in words."""
        return f"version {self.first_version}" if self.first_version else "the base model"

    @property
    def accuracy_before(self) -> float | None:
        """Held-out accuracy of the run's first version, usually the base model."""
        first = self.first_version
        return next((e.greedy.accuracy for e in self.evaluations if e.greedy.policy_version == first), None)

    @property
    def accuracy_after(self) -> float | None:
        """Held-out accuracy of the newest evaluated version."""
        first = self.first_version
        return next((e.greedy.accuracy for e in reversed(self.evaluations) if e.greedy.policy_version > first), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node that has ever joined: its stored totals, and its last live report."""

    ALSO_IN_JSON: ClassVar = ("banned", "trained", "evaluated")

    totals: NodeTotals = field(metadata=FLAT)
    connected: bool
    activity: str
    """Activity in its last report: preparing, waiting, fetching, sampling, paused or draining. Empty if the node is
    away."""
    policy_version: int | None
    """Newest version that the node can sample from."""
    capacity: int
    in_flight: int
    """Rollouts leased to the node and not yet received."""
    tokens_per_s: float
    precision: str = ""
    """Precision of the engine's weights, as reported now or at the last check; empty if unknown."""
    costs_per_hour: float = 0.0
    """Hourly cost while active, in US dollars. Includes power if the hub counts power."""
    standby: str = ""
    """Reason for standing by, as told to the node; empty if none was told."""

    @property
    def banned(self) -> bool:
        return self.totals.banned_at is not None

    @property
    def trained(self) -> int:
        """Number of the node's rollouts that were trained on."""
        return self.totals.trained_rollouts

    @property
    def evaluated(self) -> int:
        """Number of the node's rollouts that an evaluation used."""
        return self.totals.evaluated_rollouts


@dataclass(frozen=True, slots=True, eq=False)
class NodesAway:
    """Nodes that are away and hold no rollouts. A change of any node in it replaces the whole object, so derived values
    can be cached.
    """

    by_id: Mapping[str, NodeView]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """All nodes that the pages know."""

    here: Mapping[str, NodeView]
    """Nodes that are connected or hold rollouts, by id."""
    away: NodesAway

    def __iter__(self) -> Iterator[NodeView]:
        yield from self.here.values()
        yield from self.away.by_id.values()

    def __len__(self) -> int:
        return len(self.here) + len(self.away.by_id)

    def get(self, node_id: str) -> NodeView | None:
        return self.here.get(node_id) or self.away.by_id.get(node_id)
