"""All data that the pages read: immutable views of the run.

A view shows stored figures unchanged (`echo_shared.records.run`), and adds live figures that are not stored. The same
dataclasses are the JSON of /api/v1/, so field names must not change.

Times are seconds since the epoch on the hub's clock. Names of durations end in `_s`, of sizes in `_bytes`; shares and
accuracies are in 0..1. None means that the value is not known yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Final

from echo_hub.dashboard.session_figures import SessionFigures
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
    """The run's current activity, or what the run waits for."""

    STARTING = "starting"
    LEARNER_DOWN = "learner_down"
    PAUSED = "paused"
    DRAINING = "draining"
    DRAINED = "drained"
    LACKS_NODES = "lacks_nodes"
    COLLECTING = "collecting"
    TRAINING = "training"
    SERVING = "serving"
    """The run has no task, so it trains nothing; nodes work for tenants."""
    EVALUATING = "evaluating"
    """All steps are trained; the last version is being evaluated."""
    FINISHED = "finished"


class Readiness(StrEnum):
    """States of the hub as /readyz reports them. Only a ready hub can train."""

    STARTING = "starting"
    READY = "ready"
    FAILING = "failing"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationView:
    """One version's results on the held-out problems: with greedy sampling, and also with random samples if the run's
    settings ask for them."""

    greedy: Evaluation = field(metadata=FLAT)
    """Results with greedy sampling. In JSON, its fields are merged into this object. If two fields have the same name,
    the field below wins.
    """
    samples: int = 0
    """Number of completions of each problem at the run's temperature; 0 if only greedy ones were drawn."""
    mean_at_k: float | None = None
    """Share of a problem's samples that solve it, averaged over problems."""
    mean_at_k_error: float | None = None
    pass_at: Mapping[int, float] = field(default_factory=dict)
    """Maps k to the probability that at least one of k samples solves a problem."""
    seconds: float
    """Seconds that sampling the whole evaluation took."""

    @property
    def pass_at_k(self) -> float | None:
        """Probability that at least one of all samples solves a problem."""
        return self.pass_at.get(self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSetView:
    """Results of all versions on one of several held-out sets."""

    name: str
    evaluations: tuple[EvaluationView, ...]
    """One entry for each evaluated version, in the order of versions."""

    @property
    def newest(self) -> EvaluationView | None:
        """The newest evaluation; None before the first."""
        return self.evaluations[-1] if self.evaluations else None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionView:
    """One published version, its distribution to nodes, and its size on the hub's disk."""

    record: VersionRecord = field(metadata=FLAT)
    size_bytes: int
    """Size of the version's whole adapter on the hub's disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DisseminationView:
    """How many nodes already have the newest version that the hub has announced."""

    policy_version: int
    carrier: str
    way: str
    size_bytes: int
    payload_bytes: int
    since_s: float
    """Seconds since the announcement. If all nodes have the version: seconds from the announcement to the last node's
    report.
    """
    num_told: int
    """Number of nodes to which the version was announced. Nodes that left before they had it are not counted."""
    num_reached: int
    """Nodes among `num_told` that have the version."""
    share_arrived: float
    """Bytes that have arrived, as a share of all bytes that the `num_told` nodes need."""

    @property
    def under_way(self) -> bool:
        return self.num_reached < self.num_told


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvisedNodes:
    """Number of nodes of one kind. If the operator adds them, the learner is kept busy."""

    kind: str
    """Engine and device as reported by such nodes: untrusted text."""
    count: int | None
    """Number of nodes to add; None if no number is enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityView:
    """How busy the learner is: measured over the newest steps, and predicted by the capacity model."""

    window_s: float
    """Length of the measured time window, in seconds. The shares below refer to this window."""
    idle_share: float
    """Share of the window's time in which the learner did not train."""
    idle_by_reason: Mapping[str, float]
    """Idle time by reason, as shares of the window. The reasons are waiting for `rollouts`, `hand_off`, `evaluation`,
    learner `down`, `start` of the run."""
    step_s: float
    """Seconds of one step's training and hand-off."""
    broadcast_s: float
    """Seconds from the end of a version's training until nodes have it."""
    predicted_utilisation: float
    """Share of time in which the learner could train, as the capacity model predicts for the connected nodes."""
    rollouts_per_s: float
    """Rollouts a second that the connected nodes can return, as the capacity model predicts."""
    needed_per_s: float
    """Rollouts a second that a learner without idle time would consume."""
    missing_per_s: float
    """Rollouts a second that the nodes cannot supply; 0 if the nodes are fast enough. Even then, rollouts may arrive
    too late."""
    advised_nodes: tuple[AdvisedNodes, ...]
    """Nodes to add. Each entry alone would keep the learner busy."""
    advised_staleness: int | None
    """Smallest staleness bound that would keep the learner busy with the connected nodes. None if no bound suffices, or
    if the run's mode has no staleness bound.
    """
    advised_interval: int | None
    """Smallest number of steps between published versions that would keep the learner busy. None if no number
    suffices."""
    verdict: str
    """A summary in words, for the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsView:
    """Lengths, in sampled tokens, of the newest completions with one outcome."""

    outcome: str
    """`trained`, `in flight`, or the reason for the drop."""
    rollouts: int
    mean: float
    p10: float
    p50: float
    p90: float
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkView:
    """What became of the newest rollouts, and how stale the newest batches were. At most some seconds old."""

    lengths: tuple[LengthsView, ...] = ()
    """Lengths of the received training completions among the newest 5,000 leased rollouts, by outcome."""
    groups_by_staleness: Mapping[int, int] = field(default_factory=dict)
    """Maps staleness (in versions, at training) to the number of groups, over the newest steps' batches."""
    steps: int = 0
    """Number of newest steps that `groups_by_staleness` covers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostView:
    """Costs of nodes, in US dollars."""

    spend_per_hour: float
    """Hourly cost of all active nodes together."""
    spend_cap_per_hour: float
    """Upper limit of the hourly cost; 0 means that only nodes without a price work."""
    total: float
    """Cost of the run so far, from the database, so a few seconds old."""
    active_s: float
    """Seconds for which nodes with a price have worked, summed over nodes."""
    per_trained_rollout: float | None
    """Total cost divided by the number of all trained rollouts, including those of nodes without a price; None before
    the first trained rollout.
    """
    nodes_active: int
    """Number of connected nodes that have a price (the operator pays for their hours) and may get leases now."""
    nodes_standing_by: int
    """Connected nodes with a price that get no leases now, because cheaper nodes suffice or the spend cap is
    reached.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumView:
    """Counts of problems (or of tasks) by their newest pass rate, which is the share of completions that solved the
    problem."""

    by: str
    """What the other fields count: "problem" if they count problems, "task" if they count tasks."""
    solved: int
    hopeless: int
    between: int
    """Number of problems (or tasks) with a pass rate above 0 and below 1. The rollouts of such a problem's group have
    different rewards, which give a training signal."""
    passed_over: int
    """Number of problems that the curriculum has left out since the hub's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiblingView:
    """Another run of the same hub, as shown on this run's pages."""

    run_id: str
    name: str
    address: str
    """Web address of the run's pages; "" if the run was never served."""
    trained_step: int
    steps_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The run at the time `as_of`. The pages compute all ages relative to `as_of`."""

    ALSO_IN_JSON: ClassVar = ("mean_reward", "staleness_mean", "staleness_max", "accuracy_before", "accuracy_after")

    as_of: float
    run_id: str
    name: str
    mode: str
    task: str
    base_model: str
    join_command: str
    """Command with which volunteers join. It contains this hub's address."""
    state: RunState
    state_detail: str = ""
    """Current activity, or what the run waits for, in words."""
    doing: Doing = Doing.TRAINING
    """Current activity, or what the run waits for, as a value for programs."""
    health: Health = field(default_factory=lambda: Health(state=HubState.READY))
    """The hub's health state, and the reasons for it."""
    install_command: str = ""
    """Command that installs a node from this hub and joins; empty if the operator does not offer it."""
    windows_install_command: str = ""
    """`install_command` in the form for Windows PowerShell."""
    address: str = ""
    """The hub's address that the join and install commands contain."""
    problems: tuple[str, ...] = ()
    """Texts about everything that is broken, including the alarms, for the operator."""
    alarms: tuple[str, ...] = ()
    """Texts about problems from which the hub tries to recover by itself."""
    trains: bool = True
    """False if the run has no task: the hub trains nothing, and its nodes work only for tenants."""
    problem_kinds: tuple[str, ...] = ()
    """Kinds of the problems found by the hub's monitoring."""
    starting: bool = False
    """True while the hub starts. Nodes may join, but nothing is trained yet."""
    started_at: float
    finished_at: float | None = None
    steps_total: int
    first_version: int = 0
    """Version with which the run started; 0 is the base model."""
    lineage: tuple[str, ...] = ()
    """Origins of the first version, in words, starting with the nearest origin."""
    trained_step: int = 0
    published_version: int = 0
    group_size: int
    max_staleness: int
    leasing: str = "open"
    """open, paused, draining or drained, as set by the operator."""
    live: Mapping[str, float] = field(default_factory=dict)
    """Current values of the settings that operators may change during the run."""
    newest_step: StepRecord | None = None
    """The newest trained step; None before the first."""
    rollouts_per_s: float = 0.0
    """Rate of received rollouts over about the last minute."""
    rollouts_gone_on: int = 0
    """Number of rollouts since the hub's start that continued an unfinished rollout. Unfinished rollouts come from
    other nodes, or from the same node before a restart."""
    tokens_saved: int = 0
    """Number of tokens that these rollouts took over from unfinished ones, instead of sampling them again."""
    turned_away: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Number of refused connections, nodes and frames (messages) since the hub's start, by kind (connection, node,
    frame), then by reason.
    """
    curriculum: CurriculumView | None = None
    """Problems by pass rate; None if the run has no curriculum."""
    judged: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Counts of requests to each reward judge since the hub's start, by the judge's name: calls, unanswered,
    without_verdict, tokens_read, tokens_written.
    """
    sessions: SessionFigures | None = None
    """Sessions of environments with state; None if the run has none."""
    buffered_groups: int = 0
    """Groups whose rollouts are complete and scored, and that wait for a training step."""
    accounting: Accounting = field(default_factory=Accounting)
    evaluations: tuple[EvaluationView, ...] = ()
    """Evaluations in the order of versions. If there are very many, some are left out. If there are several held-out
    sets, figures are weighted means over the sets.
    """
    evaluation_sets: tuple[EvaluationSetView, ...] = ()
    """Results on each held-out set; empty if there is only one."""
    tasks: tuple[str, ...] = ()
    """Keys of the training tasks, if there are several."""
    versions: tuple[VersionView, ...] = ()
    """Published versions, newest first; old ones may be left out."""
    fetches_by_transport: Mapping[str, int] = field(default_factory=dict)
    """Number of fetches by main transport, over all versions and nodes."""
    dissemination: DisseminationView | None = None
    """How far the newest version has reached the nodes; None until the hub has announced a version since its start."""
    newest_complete: int | None = None
    """Newest version that has reached all nodes to which it was announced. A node with a newer version counts as
    reached."""
    nodes_on_newest: int = 0
    """Connected nodes that hold the newest published version."""
    nodes_connected: int = 0
    nodes_known: int = 0
    """Number of nodes that ever joined. The pages may list fewer nodes."""
    nodes_useful: int = 0
    """Number of useful nodes: the hub trained on or evaluated at least one rollout of each."""
    uplink_bytes_s: float | None = None
    """The hub's upload capacity in bytes a second, as configured or measured; None if unknown."""
    events: tuple[RunEvent, ...] = ()
    """Events, newest first; old ones may be left out."""
    capacity: CapacityView | None = None
    """How busy the learner is; None before the first step."""
    work: WorkView = field(default_factory=WorkView)
    cost: CostView | None = None
    """Costs of nodes; None if no node has or had a price."""
    trust: TrustStatus = field(default_factory=TrustStatus)
    siblings: tuple[SiblingView, ...] = ()
    """Other runs of this hub, by name."""

    @property
    def broken(self) -> bool:
        """Return True if a problem needs the operator. Alarms do not: the hub recovers from them by itself."""
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
    """One node that has ever joined: its stored totals, and its latest report if it is connected."""

    ALSO_IN_JSON: ClassVar = ("banned", "trained", "evaluated")

    totals: NodeTotals = field(metadata=FLAT)
    connected: bool
    activity: str
    """Activity in the node's last report: preparing, waiting, fetching, sampling, paused or draining. "" if the node is
    away."""
    policy_version: int | None
    """Newest version that the node can sample from."""
    capacity: int
    in_flight: int
    """Rollouts leased to the node and not yet received."""
    tokens_per_s: float
    precision: str = ""
    """Precision of the engine's weights, as reported now or at the last check; "" if unknown."""
    costs_per_hour: float = 0.0
    """Hourly cost while the node works, in US dollars. Includes its electricity if the operator has set a price for it.
    """
    standby: str = ""
    """Why the node stands by (is connected but gets no leases), as the hub told the node; "" if it does not stand by.
    """
    num_links: int = 0
    """Number of other nodes with which the node exchanges pieces of new versions, as the node reports."""
    num_punched: int = 0
    """Number of other nodes with which the node exchanges pieces by hole punching, because neither router accepts
    connections.
    """

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
    """Disconnected nodes that hold no rollouts. This object never changes: if one of the nodes changes, the hub makes a
    new object. So callers may cache what they compute from one object."""

    by_id: Mapping[str, NodeView]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """All nodes that the pages know: connected ones, those that hold rollouts, and others."""

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
