"""All that the pages read: frozen views of the run, and the protocol of whoever makes them.

The same dataclasses are the JSON of /api/v1/: a field's name is a promise. Times are seconds since the epoch on the
hub's clock, durations end in `_s`, sizes in `_bytes`, shares and accuracies lie in 0..1. None = not known yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Protocol

FLAT: Final = MappingProxyType({"flat": True})
"""Marks a mapping whose items are an object's own fields in JSON."""


class RunState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"


class Readiness(StrEnum):
    """Whether the hub can train."""

    STARTING = "starting"
    READY = "ready"
    FAILING = "failing"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationView:
    """How one version does on the held-out problems: greedy, and by several samples where the run asks for them."""

    policy_version: int
    accuracy: float
    """Greedy, as are the other figures that do not say otherwise."""
    accuracy_error: float = 0.0
    """Standard error."""
    num_problems: int
    mean_reward: float
    mean_tokens: float
    """Of a completion."""
    share_truncated: float
    samples: int = 0
    """Completions of each problem at the run's temperature; 0 = only the greedy one."""
    mean_at_k: float | None = None
    """The share of a problem's samples that solve it, mean over problems."""
    mean_at_k_error: float | None = None
    pass_at: Mapping[int, float] = field(default_factory=dict)
    """k -> the probability that one of k samples solves a problem."""
    seconds: float
    """Of the sampling engine's time, for all of it."""
    evaluated_at: float

    @property
    def pass_at_k(self) -> float | None:
        """For all samples."""
        return self.pass_at.get(self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionView:
    """One published version and how it reached the nodes."""

    policy_version: int
    published_at: float
    size_bytes: int
    """Of the whole adapter."""
    payload_bytes: int | None = None
    """Of what travels in its place."""
    carrier: str | None = None
    """`keyframe` or `delta`."""
    way: str | None = None
    """How the hub sent it: `inline`, `broadcast`, `swarm` or `web_seed`."""
    dissemination_p50_s: float | None = None
    """From the announcement to the node's report that it is verified, on the hub's clock, as are the two below; over
    the nodes that were connected at the announcement."""
    dissemination_p95_s: float | None = None
    dissemination_max_s: float | None = None
    fetches_by_transport: Mapping[str, int] = field(default_factory=dict)
    """How many nodes fetched it, by `swarm`, `web_seed`, `shared_memory`, `inline` and `broadcast`."""
    bytes_by_transport: Mapping[str, int] = field(default_factory=dict)
    """From `swarm`, `web_seed`, `shared_memory`, from the hub's hand (`pushed`) and handed on by nodes (`mesh`)."""

    @property
    def num_fetched(self) -> int:
        return sum(self.fetches_by_transport.values())


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
    """Of them: those that have it."""
    share_arrived: float
    """Of all bytes that they are to get."""

    @property
    def under_way(self) -> bool:
        return self.num_reached < self.num_told


@dataclass(frozen=True, slots=True, kw_only=True)
class NotableEvent:
    """One line of the operator's log: a node joined, the learner restarted, a rollout was rejected."""

    at: float
    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One trained step. It turned version `step` - 1 into `step`."""

    step: int
    trained_at: float
    num_rollouts: int
    num_tokens: int
    """Of the completions."""
    mean_reward: float
    staleness_mean: float
    staleness_max: int
    figures: Mapping[str, float | None] = field(default_factory=dict, metadata=FLAT)
    """All of `echo_shared.step_figures` by their keys. In JSON they stand among the step's other fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The run at one moment, `as_of`; every age on the pages is counted from it."""

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
    """Why it is paused, or what it waits for."""
    problems: tuple[str, ...] = ()
    """What is broken, for the operator."""
    starting: bool = False
    """The hub is not up yet: nodes may join, and nothing is trained."""
    started_at: float
    finished_at: float | None = None
    steps_total: int
    trained_step: int = 0
    published_version: int = 0
    group_size: int
    max_staleness: int
    mean_reward: float | None = None
    """Of the newest trained step, as are the three below."""
    staleness_mean: float | None = None
    staleness_max: int | None = None
    newest_step: StepView | None = None
    rollouts_per_s: float = 0.0
    """Received, over the last minute or so."""
    buffered_groups: int = 0
    """Complete, scored, and waiting for the learner."""
    accounting: Accounting = Accounting()
    evaluations: tuple[EvaluationView, ...] = ()
    """In the order of their versions; of many, some between are left out."""
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
    uplink_bytes_s: float | None = None
    """What the hub can send, as set or measured."""
    events: tuple[NotableEvent, ...] = ()
    """Newest first; old ones may be left out."""

    @property
    def readiness(self) -> Readiness:
        if self.problems:
            return Readiness.FAILING
        return Readiness.STARTING if self.starting else Readiness.READY

    @property
    def accuracy_before(self) -> float | None:
        """Of the base model."""
        return next((e.accuracy for e in self.evaluations if e.policy_version == 0), None)

    @property
    def accuracy_after(self) -> float | None:
        """Of the newest version that was evaluated."""
        return next((e.accuracy for e in reversed(self.evaluations) if e.policy_version > 0), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node that has ever joined. `name`, `backend` and `device` are what it says of itself: hostile input."""

    node_id: str
    name: str
    backend: str
    device: str
    connected: bool
    banned: bool = False
    activity: str
    """As it last reported: preparing, waiting, fetching, sampling, draining."""
    policy_version: int | None
    """Newest it can sample from."""
    capacity: int
    in_flight: int
    """Rollouts leased to it and not yet received."""
    tokens_per_s: float
    received: int
    trained: int
    evaluated: int = 0
    dropped: int
    last_seen: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderboardRow:
    """One node's work that was trained on or evaluated, counted on the hub from receipts."""

    rank: int
    """From 1, by `share`."""
    node_id: str
    name: str
    trained_rollouts: int
    trained_tokens: int
    evaluated_rollouts: int = 0
    """Drawn to see how good a version is."""
    share: float
    """Of all rollouts that were trained on or evaluated."""
    last_seen: float


class Changes:
    """Says that something changed, never what: who waits then reads the newest state, so a missed change is harmless.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        self.number = 0
        """How many changes there were."""
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Cheap: call it at every change."""
        self.number += 1
        woken, self._next = self._next, asyncio.Event()
        woken.set()

    async def wait(self, seen: int) -> int:
        """Returns `number` once it is above `seen`. Cancel-safe."""
        while self.number <= seen:
            await self._next.wait()
        return self.number


class PagesSource(Protocol):
    """What the hub supplies. Reads may overlap; each returns the newest state that is there."""

    @property
    def changes(self) -> Changes: ...

    async def run_view(self) -> RunView: ...

    async def nodes(self) -> tuple[NodeView, ...]: ...

    async def steps(self, since: int) -> tuple[StepView, ...]:
        """The trained steps after step `since`, in order; where there are many, at least the first 1,000."""
        ...

    async def leaderboard(self) -> tuple[LeaderboardRow, ...]:
        """In rank order; nodes without a share may be left out."""
        ...
