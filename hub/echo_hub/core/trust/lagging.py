"""Nodes that likely draw with an older version than they name: their mismatch with the learner grows, others' does not.

    node a    6e-4  7e-4  6e-4  9e-4  2e-3  3e-3  5e-3 ...      its engine has kept version 4
    node b    5e-4  6e-4  7e-4  6e-4  5e-4  6e-4  7e-4 ...

The learner finds each rollout's mismatch (`mismatch`) in its own forward pass, so this needs no verifier. Of a node's
rollouts, `POINT` make a point: their median, which no odd rollout moves. A node's mismatch is the median of its last
`SMOOTHED` points, at least `FLOOR`. It is held against what is expected of it:

    shown       the lower median of the mismatch of the other nodes of its kind, each grown by what an older policy
                explains
    ratio       mismatch / shown
    usual       the median of its first `USUAL` ratios, at least 1

A node *lags* after `LASTING` points in a row with a ratio of `GROWN` times its usual one. So what a node's numerics add
counts nothing, and neither does what all nodes show: a larger learning rate, a falling entropy. Kinds are roundings;
those of 16 bits and more are one. A node that is alone of its kind is held against its own first points; it is only
known to grow, by `GROWN_ALONE`, and not to be at fault. A node that connects again begins anew: its engine may be
another. A node that never had another version than the first is like its first points, and not found.

Measured on the built-in model, five nodes of 24 rollouts a step: a node whose engine kept version 3, or 6, was found 14
steps later, at .055 and .015 nats a token. No other was, of float32, bfloat16 and 4 bits, up to eight steps late, even
in a run whose learning rate tore it apart; the largest ratio was 4 times the usual one, and for one point.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean, median, median_low
from typing import Final

from echo_hub.core.trust.screening import Seen

USUAL: Final = 8
POINT: Final = 16
"""Rollouts, of several groups: those of one prompt are alike."""
SMOOTHED: Final = 3
LASTING: Final = 3
GROWN: Final = 8.0
GROWN_ALONE: Final = 16.0
FLOOR: Final = 1e-3
"""Nats per token. Less is rounding, or does no harm."""
PEERS: Final = 64
"""Other nodes that one is held against: those with the newest points."""
REMEMBERED: Final = 64
"""Steps without a rollout of it, after which a node is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """A node that lags."""

    node_id: str
    mismatch: float
    """Nats per token, of late."""
    usual: float
    """What such a node would have now."""
    since: int
    """The step with which it began to grow."""
    policy_version: int
    """The version that the node named then. It draws with this one or an older one."""
    is_alone: bool
    """No other node shows that it is not the run itself."""

    def __str__(self) -> str:
        found = (
            f"Since step {self.since} its rollouts fit the learner's policy less and less: {self.mismatch:.2g} nats a "
            f"token, where {self.usual:.2g} would be usual."
        )
        stale = f"draws with version {self.policy_version} or an older one, not with the versions that it names"
        if self.is_alone:
            return f"{found} It {stale}, or the run itself has changed."
        return f"{found} The rollouts of other nodes do not: it likely {stale}."


@dataclass(slots=True, eq=False)
class _Node:
    seen_at: int = 0
    """The step that had the newest rollout of it."""
    pending: list[tuple[float, int]] = field(default_factory=list)
    """Mismatch per token, and staleness, of rollouts that are no point yet."""
    points: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=SMOOTHED))
    """Mismatch, staleness and step of each."""
    mismatch: float | None = None
    """Of late; None: not known yet."""
    staleness: float = 0.0
    """Of late."""
    kind: str = ""
    first: list[tuple[float, float]] = field(default_factory=list)
    """Its first mismatches, each with its staleness."""
    ratios: list[float] = field(default_factory=list)
    """Its first ratios."""
    streak: int = 0
    since: int = 0
    policy_version: int = 0
    """The one named at `since`, which is the step that makes the next version out of the newest one."""

    def add_point(self, step: int) -> None:
        """Make a point of what is pending."""
        self.points.append((median(kl for kl, _ in self.pending), fmean(d for _, d in self.pending), step))
        self.pending.clear()
        if len(self.points) == SMOOTHED:
            self.mismatch = max(FLOOR, median(kl for kl, _, _ in self.points))
            self.staleness = fmean(staleness for _, staleness, _ in self.points)
            if len(self.first) < USUAL:
                self.first.append((self.mismatch, self.staleness))

    def explains(self, mismatch: float, staleness: float) -> float:
        """Return what a node with this mismatch would have at this node's staleness, if that is larger: the divergence
        grows with the square of the steps at most, as long as these point one way."""
        older: float = max(1.0, (1.0 + self.staleness) / (1.0 + staleness))
        return mismatch * older * older


class Lagging:
    """Told of every step's rollouts; memory grows with the nodes of `REMEMBERED` steps alone."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._lags: dict[str, Lag] = {}

    @property
    def lags(self) -> tuple[Lag, ...]:
        """The nodes that lag now."""
        return tuple(self._lags.values())

    def forget(self, node_id: str) -> None:
        """Let the node begin anew."""
        self._nodes.pop(node_id, None)
        self._lags.pop(node_id, None)

    def look_again(self, node_id: str) -> None:
        """Hold what the node returns from now on against what was usual."""
        self._lags.pop(node_id, None)
        if (node := self._nodes.get(node_id)) is not None:
            node.pending.clear()
            node.points.clear()
            node.mismatch, node.streak = None, 0

    def add(self, step: int, seen: Iterable[Seen], kind_of: Callable[[str], str]) -> tuple[Lag, ...]:
        """Take one step's rollouts. Return the nodes that begin to lag with them. `kind_of`: of a node, by its id."""
        fresh: set[str] = set()
        for node_id, evidence, staleness in seen:
            if evidence.num_tokens:
                node = self._nodes.setdefault(node_id, _Node())
                node.seen_at = step
                node.pending.append((evidence.mismatch_kl / evidence.num_tokens, staleness))
                if len(node.pending) >= POINT:
                    fresh.add(node_id)
        for node_id in sorted(fresh):
            node = self._nodes.pop(node_id)
            node.kind = kind_of(node_id)
            node.add_point(step)
            self._nodes[node_id] = node  # Those with the newest points are the last.
        for node_id in [one for one, node in self._nodes.items() if node.seen_at < step - REMEMBERED]:
            self.forget(node_id)
        begun = [self._judge(node_id) for node_id in sorted(fresh)]
        return tuple(lag for lag in begun if lag is not None)

    def _judge(self, node_id: str) -> Lag | None:
        """The lag, if it begins with the node's newest point."""
        node = self._nodes[node_id]
        if node.mismatch is None:
            return None
        shown = self._shown(node)
        is_alone = shown is None
        if shown is None:
            usual, grown = median(node.explains(*one) for one in node.first), GROWN_ALONE
            is_known = len(node.first) == USUAL
        else:
            if len(node.ratios) < USUAL:
                node.ratios.append(node.mismatch / shown)
            usual, grown = shown * max(1.0, median(node.ratios)), GROWN
            is_known = len(node.ratios) == USUAL
        if not is_known or node.mismatch < grown * usual:
            node.streak = 0
            self._lags.pop(node_id, None)
            return None
        if not node.streak:
            _, staleness, node.since = node.points[0]
            node.policy_version = max(0, node.since - 1 - int(staleness))
        node.streak += 1
        if node.streak < LASTING:
            return None
        known = self._lags.get(node_id)
        lag = Lag(
            node_id=node_id,
            mismatch=node.mismatch,
            usual=usual,
            since=node.since,
            policy_version=node.policy_version,
            is_alone=is_alone,
        )
        self._lags[node_id] = lag
        return lag if known is None or (known.is_alone and not is_alone) else None

    def _shown(self, node: _Node) -> float | None:
        """What others of its kind show; None: there is none."""
        others = (
            other
            for other in reversed(self._nodes.values())
            if other is not node and other.kind == node.kind and other.mismatch is not None
        )
        explained = [node.explains(other.mismatch or 0.0, other.staleness) for other in islice(others, PEERS)]
        return median_low(explained) if explained else None
