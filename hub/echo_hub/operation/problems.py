"""The run's problems: when each begins and when it ends. Pure: observations in, changes out.

A problem ends once it was absent for `END_S`. A measured value must also be better than its limit by a margin, so that
a value that hovers at the limit is one problem, not many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from echo_hub.operation.reward_trend import RewardTrend

END_S: Final = 60.0
BETTER: Final = 0.8
"""An idle learner and an attack end below this share of their limit; a full disk ends above its limit over this."""
IDLE_SHARE: Final = 0.8
"""A learner that waits for this share of its time is idle: it could train on five times as many rollouts."""
QUARANTINED: Final = 3
"""An attack: this many nodes go into quarantine within an hour. Honest nodes hardly ever do, so three are no chance."""
HOUR_S: Final = 3_600.0
RATE_S: Final = 60.0
"""Span over which refusals are counted."""


class ProblemKind(StrEnum):
    """Kinds of problems."""

    LEARNER_DOWN = "learner_down"
    DISK_FULL = "disk_full"
    """The hub waits for room."""
    DATABASE_AWAY = "database_away"
    """The hub waits for the database server."""
    JUDGE_AWAY = "judge_away"
    """Rollouts wait for a judge."""
    SCORERS_AWAY = "scorers_away"
    """Rollouts wait for a scorer."""
    VERIFIER_AWAY = "verifier_away"
    """Checks wait for a verifier."""
    EVALUATOR_AWAY = "evaluator_away"
    """Evaluations wait for a sampler."""
    VERSION_WITHDRAWN = "version_withdrawn"
    NODE_LAGS = "node_lags"
    COMMON_FAULT = "common_fault"
    LEARNER_IDLE = "learner_idle"
    NO_NODES = "no_nodes"
    REWARD_FELL = "reward_fell"
    DISK = "disk"
    ATTACK = "attack"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Thresholds; 0 = never a problem. `AlertsConfig` has the same fields, with their meaning."""

    learner_idle_s: float
    no_nodes_s: float
    reward_fell: float
    disk_free_bytes: int
    turned_away_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A run at one moment."""

    broken: Mapping[ProblemKind, str] = field(default_factory=dict)
    """Texts of what is broken, by the hub's parts."""
    is_over: bool = False
    """Nothing is leased for training any more."""
    lacks_nodes: bool = False
    """None is connected, and the run needs some."""
    nodes_connected: int = 0
    learner_waits: bool = False
    """For rollouts."""
    idle_share: float | None = None
    """Of the learner's time over its newest steps, what it waited for rollouts; None while that says nothing."""
    idle_window_s: float = 0.0
    """How long those steps took."""
    disk_free_bytes: int | None = None
    """None: it could not be found out."""
    forged: str = ""
    """What in the newest step's figures is a sign of forged rollouts; empty = nothing."""
    quarantined: int = 0
    """Nodes that are, now."""
    turned_away: int = 0
    """Connections, nodes and frames since the hub's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One that is there."""

    kind: ProblemKind
    text: str
    """What is wrong, and what to do."""
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A problem began or ended. `problem.text` is its newest text."""

    problem: Problem
    began: bool
    at: float


class Problems:
    """Keeps the problems. `observe` takes an observation, some seconds after the last one, and returns the changes."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.rewards = RewardTrend()
        """To be told of each trained step."""
        self._active: dict[ProblemKind, Problem] = {}
        self._last_seen: dict[ProblemKind, float] = {}
        self._waits_since: float | None = None
        self._alone_since: float | None = None
        self._fed_since: float | None = None
        """Nodes have been there since then; at first, since it is watched."""
        self._quarantined: deque[tuple[float, int]] = deque()
        """How many, when."""
        self._turned_away: deque[tuple[float, int]] = deque()

    @property
    def active(self) -> tuple[Problem, ...]:
        """The problems that last, in the order in which they began."""
        return tuple(self._active.values())

    def observe(self, seen: Observation, now: float) -> list[Change]:
        """Return the problems that begin or end with this observation."""
        self._note(seen, now)
        found = dict(self._found(seen, now))
        changes = []
        for kind, text in found.items():
            self._last_seen[kind] = now
            known = self._active.get(kind)
            problem = Problem(kind=kind, text=text, since=now if known is None else known.since)
            self._active[kind] = problem
            if known is None:
                changes.append(Change(problem=problem, began=True, at=now))
        for kind in [kind for kind in self._active if kind not in found]:
            if seen.is_over or now - self._last_seen[kind] >= END_S:
                changes.append(Change(problem=self._active.pop(kind), began=False, at=now))
        return changes

    def _note(self, seen: Observation, now: float) -> None:
        """Note since when each condition lasts that is a problem only after a while."""
        waits = seen.learner_waits and not seen.is_over
        alone = seen.lacks_nodes and not seen.is_over
        self._waits_since = _since(self._waits_since, waits, now)
        self._alone_since = _since(self._alone_since, alone, now)
        if alone or self._fed_since is None:
            self._fed_since = now
        for history, number, span_s in (
            (self._quarantined, seen.quarantined, HOUR_S),
            (self._turned_away, seen.turned_away, RATE_S),
        ):
            history.append((now, number))
            while history[0][0] < now - span_s:
                history.popleft()

    def _found(self, seen: Observation, now: float) -> Iterator[tuple[ProblemKind, str]]:
        yield from seen.broken.items()
        if ProblemKind.DISK_FULL not in seen.broken and (text := self._disk(seen)) is not None:
            yield ProblemKind.DISK, text
        if seen.is_over:
            return
        if (text := self._no_nodes(now)) is not None:
            yield ProblemKind.NO_NODES, text
        elif self._alone_since is None and (text := self._idle(seen, now)) is not None:
            yield ProblemKind.LEARNER_IDLE, text
        if (text := self._reward_fell()) is not None:
            yield ProblemKind.REWARD_FELL, text
        if (text := self._attack(seen, now)) is not None:
            yield ProblemKind.ATTACK, text

    def _disk(self, seen: Observation) -> str | None:
        limit, free = self._limits.disk_free_bytes, seen.disk_free_bytes
        least = limit / BETTER if ProblemKind.DISK in self._active else limit
        if free is None or free >= least:
            return None
        return f"The disk of the run directory has {free / 1e9:.2f} GB left: make room, or the hub will have to wait."

    def _no_nodes(self, now: float) -> str | None:
        limit, since = self._limits.no_nodes_s, self._alone_since
        if not limit or since is None or now - since < limit:
            return None
        return (
            f"No node has been connected for {_minutes(now - since)}. Give out the line with which nodes join, and see "
            "that they can reach this hub's address: `echo-node status` says what stands in a node's way."
        )

    def _idle(self, seen: Observation, now: float) -> str | None:
        limit_s, since = self._limits.learner_idle_s, self._waits_since
        if limit_s and since is not None and now - since >= limit_s:
            return (
                f"The learner has waited for rollouts for {_minutes(now - since)}, with {_nodes(seen)} connected. Look "
                "at what each node does; `echo-hub plan` says how many more would help."
            )
        share, is_active = seen.idle_share, ProblemKind.LEARNER_IDLE in self._active
        if share is None or share < IDLE_SHARE * (BETTER if is_active else 1.0):
            return None
        if self._fed_since is None or now - seen.idle_window_s < self._fed_since:
            return None  # The learner was idle because no node was connected.
        return f"The learner was idle for {share:.0%} of its newest steps' time. `echo-hub plan` says what would help."

    def _reward_fell(self) -> str | None:
        limit = self._limits.reward_fell
        has_fallen = ProblemKind.REWARD_FELL in self._active
        fall = self.rewards.fall(limit, has_fallen=has_fallen) if limit else None
        if fall is None:
            return None
        return (
            f"The mean reward has fallen from {fall.best:.3g} (16 steps up to step {fall.best_step}) to {fall.now:.3g} "
            f"(up to step {self.rewards.step}). Look at entropy, divergence and what the model writes; a smaller "
            "learning rate may mend it, else go back to a backup from before."
        )

    def _attack(self, seen: Observation, now: float) -> str | None:
        margin = BETTER if ProblemKind.ATTACK in self._active else 1.0
        signs = [seen.forged] if seen.forged else []
        fresh = _risen(self._quarantined)
        if fresh >= QUARANTINED * margin:
            signs.append(
                f"{fresh} nodes went into quarantine within an hour. Look at their checks; pardon who is honest."
            )
        since, _ = self._turned_away[0]
        rate = _risen(self._turned_away) / max(now - since, RATE_S)
        if self._limits.turned_away_per_s and rate >= self._limits.turned_away_per_s * margin:
            signs.append(
                f"{rate:.0f} connections, nodes and frames a second are turned away. `/metrics` says which and why; "
                "slow their senders down at a proxy, or ask nodes for invitations."
            )
        return " ".join(signs) or None


def _since(known: float | None, lasts: bool, now: float) -> float | None:
    if not lasts:
        return None
    return now if known is None else known


def _risen(history: deque[tuple[float, int]]) -> int:
    """Return by how much the newest number is above the lowest."""
    return history[-1][1] - min(number for _, number in history)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def _nodes(seen: Observation) -> str:
    return "1 node" if seen.nodes_connected == 1 else f"{seen.nodes_connected} nodes"
