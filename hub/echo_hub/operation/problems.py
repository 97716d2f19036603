"""Track the run's problems: when each begins and ends. Pure: takes observations, returns changes.

A problem ends if no observation has shown it for `END_S`. A measured value must also pass its limit by a margin, so
that a value that hovers around the limit causes one problem, not many.
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
"""Margin that a measured value must reach before its problem ends. Idleness and attacks end below this share of their
limit; low disk space ends above limit / BETTER."""
IDLE_SHARE: Final = 0.8
"""Share of time that the learner spends waiting, from which on it counts as idle. With 0.8, it could train on five
times as many rollouts."""
NO_NODES_S: Final = 300.0
"""Seconds without any connected node that count as a problem. A restart of the hub or of a router takes less."""
TURNED_AWAY_PER_S: Final = 50.0
"""This many refused connections, nodes and frames a second count as an attack. Honest nodes wait before they try
again."""
QUARANTINED: Final = 3
"""This many nodes quarantined within an hour count as an attack. Honest nodes are hardly ever quarantined, so three at
once are no coincidence."""
HOUR_S: Final = 3_600.0
RATE_S: Final = 60.0
"""Seconds over which the rate of refused connections, nodes and frames is measured."""


class ProblemKind(StrEnum):
    LEARNER_DOWN = "learner_down"
    DISK_FULL = "disk_full"
    """The hub waits until the disk has space."""
    DATABASE_AWAY = "database_away"
    """The hub waits until the database server answers."""
    JUDGE_AWAY = "judge_away"
    """Rollouts wait because a judge (a model that scores) does not answer."""
    SCORERS_AWAY = "scorers_away"
    """Rollouts wait because no scoring process answers."""
    ENVIRONMENT_AWAY = "environment_away"
    """Sessions wait because their environment does not answer."""
    SLOTS_SHORT = "slots_short"
    """Turns wait because all session slots are in use."""
    VERIFIER_AWAY = "verifier_away"
    """Checks of rollouts wait because the verifier does not answer."""
    EVALUATOR_AWAY = "evaluator_away"
    """Evaluations wait because the process that draws them does not answer."""
    VERSION_WITHDRAWN = "version_withdrawn"
    NODE_LAGS = "node_lags"
    COMMON_FAULT = "common_fault"
    LEARNER_IDLE = "learner_idle"
    NO_NODES = "no_nodes"
    REWARD_FELL = "reward_fell"
    DISK = "disk"
    ATTACK = "attack"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunObservation:
    """The state of a run at one moment."""

    broken: Mapping[ProblemKind, str] = field(default_factory=dict)
    """Texts of failures of the hub itself, by kind."""
    is_over: bool = False
    """True if the last version is published. From then on, nothing is leased for training."""
    lacks_nodes: bool = False
    """True if the run needs nodes and none is connected."""
    nodes_connected: int = 0
    learner_waits: bool = False
    """True if the learner waits for rollouts."""
    idle_share: float | None = None
    """Share of the recent steps' time in which the learner waited for rollouts; None if unknown."""
    idle_window_s: float = 0.0
    """Duration in seconds of the steps over which `idle_share` is measured."""
    disk_free_bytes: int | None = None
    """Free bytes on the run directory's disk; None if the system does not tell."""
    forged: str = ""
    """Signs of forged rollouts in the newest step's figures; "" if there are none."""
    quarantined: int = 0
    turned_away: int = 0
    """Number of connections, nodes and frames refused since the hub started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProblem:
    kind: ProblemKind
    text: str
    """Description of the problem, and the action that the operator can take."""
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The beginning or the end of a problem. `problem.text` is the newest text about it."""

    problem: RunProblem
    began: bool
    at: float


class RunProblems:
    """All current problems. Call `observe` every few seconds. If a limit is 0, its check is off."""

    def __init__(self, *, learner_idle_s: float, disk_free_bytes: int) -> None:
        self._learner_idle_s = learner_idle_s
        self._disk_free_bytes = disk_free_bytes
        self.rewards = RewardTrend()
        """Trend of the reward, in which a fall is detected. The caller adds each trained step."""
        self._active: dict[ProblemKind, RunProblem] = {}
        self._last_seen: dict[ProblemKind, float] = {}
        self._waits_since: float | None = None
        self._alone_since: float | None = None
        self._fed_since: float | None = None
        """Start of the current period with connected nodes; None before the first observation."""
        self._quarantined: deque[tuple[float, int]] = deque()
        """Times at which nodes were quarantined in the last hour, as pairs (time, number of nodes)."""
        self._turned_away: deque[tuple[float, int]] = deque()

    @property
    def active(self) -> tuple[RunProblem, ...]:
        return tuple(self._active.values())

    def observe(self, seen: RunObservation, now: float) -> list[Change]:
        """Return the problems that begin or end with this observation."""
        self._note(seen, now)
        found = dict(self._found(seen, now))
        changes = []
        for kind, text in found.items():
            self._last_seen[kind] = now
            known = self._active.get(kind)
            problem = RunProblem(kind=kind, text=text, since=now if known is None else known.since)
            self._active[kind] = problem
            if known is None:
                changes.append(Change(problem=problem, began=True, at=now))
        for kind in [kind for kind in self._active if kind not in found]:
            if seen.is_over or now - self._last_seen[kind] >= END_S:
                changes.append(Change(problem=self._active.pop(kind), began=False, at=now))
        return changes

    def _note(self, seen: RunObservation, now: float) -> None:
        """Record the time since which each condition holds. Some conditions are a problem only if they last."""
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

    def _found(self, seen: RunObservation, now: float) -> Iterator[tuple[ProblemKind, str]]:
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

    def _disk(self, seen: RunObservation) -> str | None:
        limit, free = self._disk_free_bytes, seen.disk_free_bytes
        least = limit / BETTER if ProblemKind.DISK in self._active else limit
        if free is None or free >= least:
            return None
        return f"The run directory's disk has {free / 1e9:.2f} GB left. Free some space, or the hub will have to wait."

    def _no_nodes(self, now: float) -> str | None:
        since = self._alone_since
        if since is None or now - since < NO_NODES_S:
            return None
        return (
            f"No node has been connected for {_minutes(now - since)}. Share the join command, and check "
            "that nodes can reach this hub's address: `echo-node status` shows what stops a node."
        )

    def _idle(self, seen: RunObservation, now: float) -> str | None:
        limit_s, since = self._learner_idle_s, self._waits_since
        if limit_s and since is not None and now - since >= limit_s:
            return (
                f"The learner has waited for rollouts for {_minutes(now - since)}, with {_nodes(seen)} connected. "
                "Check what each node does; `echo-hub plan` says how many more would help."
            )
        share, is_active = seen.idle_share, ProblemKind.LEARNER_IDLE in self._active
        if share is None or share < IDLE_SHARE * (BETTER if is_active else 1.0):
            return None
        if self._fed_since is None or now - seen.idle_window_s < self._fed_since:
            return None  # `idle_share` covers time without a connected node.
        return f"The learner was idle for {share:.0%} of its newest steps' time. `echo-hub plan` says what would help."

    def _reward_fell(self) -> str | None:
        fall = self.rewards.fall(has_fallen=ProblemKind.REWARD_FELL in self._active)
        if fall is None:
            return None
        return (
            f"The mean reward has fallen from {fall.best:.3g} (16 steps up to step {fall.best_step}) to {fall.now:.3g} "
            f"(up to step {self.rewards.step}). Check entropy, divergence and the model's texts; a smaller "
            "learning rate may help, otherwise restore an earlier backup."
        )

    def _attack(self, seen: RunObservation, now: float) -> str | None:
        margin = BETTER if ProblemKind.ATTACK in self._active else 1.0
        signs = [seen.forged] if seen.forged else []
        fresh = _risen(self._quarantined)
        if fresh >= QUARANTINED * margin:
            signs.append(
                f"{fresh} nodes went into quarantine within an hour. Inspect their checks; pardon honest nodes."
            )
        since, _ = self._turned_away[0]
        rate = _risen(self._turned_away) / max(now - since, RATE_S)
        if rate >= TURNED_AWAY_PER_S * margin:
            signs.append(
                f"{rate:.0f} connections, nodes and frames per second are refused. `/metrics` says which and why; "
                "rate-limit their senders at a proxy, or require invites."
            )
        return " ".join(signs) or None


def _since(known: float | None, lasts: bool, now: float) -> float | None:
    if not lasts:
        return None
    return now if known is None else known


def _risen(history: deque[tuple[float, int]]) -> int:
    return history[-1][1] - min(number for _, number in history)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def _nodes(seen: RunObservation) -> str:
    return "1 node" if seen.nodes_connected == 1 else f"{seen.nodes_connected} nodes"
