"""Detection of nodes that sample with an older version than they name. The *mismatch* of such a node, the KL divergence
between its claimed log-probabilities and the learner's, grows while that of other nodes does not.

    node a    6e-4  7e-4  6e-4  9e-4  2e-3  3e-3  5e-3 ...      its engine has kept version 4
    node b    5e-4  6e-4  7e-4  6e-4  5e-4  6e-4  7e-4 ...

The learner computes each rollout's mismatch (`mismatch`) in its own forward pass, so this test needs no verifier. Every
`POINT` rollouts of a node make a *point*: the median of their mismatches, which ignores outliers. A node's mismatch is
the median of its last `SMOOTHED` points, at least `FLOOR`. It is compared with an expected value:

    shown       the lower median of the mismatch of the other nodes of its kind, each scaled up if this node's rollouts
                are staler
    ratio       mismatch / shown
    usual       the median of its first `USUAL` ratios, at least 1

A node *lags* after `LASTING` points in a row with a ratio of at least `GROWN` times its usual one. So a constant
numerical error of a node cancels out. Effects common to all nodes do too, such as a larger learning rate or a falling
entropy. A kind is a rounding of weights; all roundings of 16 bits and more are one kind. A node without peers of its
kind is compared with its own first points. Then growth by `GROWN_ALONE` is detected, possibly caused by the run itself.
A reconnected node starts over, because its engine may differ. A node that always kept the first version is not
detected, because its ratio looks constant.

Measured on the built-in model, five nodes of 24 rollouts a step: a node whose engine kept version 3, or 6, was detected
14 steps later, at .055 and .015 nats per token. No other node was detected: float32, bfloat16 and 4 bits, up to eight
steps late, even in a run destroyed by its learning rate. There the largest ratio was 4 times the usual one, for one
point.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean, median, median_low
from typing import Final

from echo_hub.core.trust.screening import Seen

USUAL: Final = 8
"""Number of a node's first values (ratios to other nodes, or own mismatches) whose median is its usual value."""
POINT: Final = 16
"""Number of rollouts per point (the median of their mismatches): enough to come from several groups, because rollouts
of one prompt are alike."""
SMOOTHED: Final = 3
"""Number of points (medians over `POINT` rollouts) whose median is a node's mismatch."""
LASTING: Final = 3
"""Number of consecutive points with grown mismatch after which a node counts as lagging."""
GROWN: Final = 8.0
"""Growth of a node's ratio to other nodes, as a multiple of its usual ratio, from which a point indicates a lag."""
GROWN_ALONE: Final = 16.0
"""Growth of a node's own mismatch from which a point indicates a lag, if the node has no peers of its kind."""
FLOOR: Final = 1e-3
"""Lower bound of a node's mismatch in nats per token: differences below it are rounding, or harmless."""
PEERS: Final = 64
"""Maximum number of other nodes that a node is compared with: those with the newest points."""
REMEMBERED: Final = 64
"""Number of steps without a rollout after which a node is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """Finding that one node probably samples with an older version than it names."""

    node_id: str
    mismatch: float
    """Recent mismatch in nats per token: the KL divergence between the node's claims and the learner's policy."""
    usual: float
    """Mismatch in nats per token to expect of an honest node at present."""
    since: int
    """Step at which the node's mismatch began to grow."""
    policy_version: int
    """Version that the node named at step `since`. It still samples with this version or an older one."""
    is_alone: bool
    """True if the node has no peers of its kind. Mismatch of peers could show that the run itself has changed."""

    def __str__(self) -> str:
        found = (
            f"Since step {self.since} its rollouts fit the learner's policy less and less: {self.mismatch:.2g} nats "
            f"per token, where {self.usual:.2g} would be usual."
        )
        stale = f"samples with version {self.policy_version} or an older one, not with the versions that it names"
        if self.is_alone:
            return f"{found} It {stale}, or the run itself has changed."
        return f"{found} The rollouts of other nodes do not: it likely {stale}."


@dataclass(slots=True, eq=False)
class _Node:
    seen_at: int = 0
    """Step of the node's newest rollout."""
    pending: list[tuple[float, int]] = field(default_factory=list)
    """Mismatch per token and staleness of the rollouts that do not form a point (median over `POINT` rollouts) yet."""
    points: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=SMOOTHED))
    """Mismatch, staleness and step of each recent point (median over `POINT` rollouts)."""
    mismatch: float | None = None
    """Median of the last `SMOOTHED` points, at least `FLOOR`, in nats per token; None: too few points."""
    staleness: float = 0.0
    """Mean staleness of the last `SMOOTHED` points, in steps."""
    kind: str = ""
    first: list[tuple[float, float]] = field(default_factory=list)
    """First `USUAL` mismatches of the node, each with the staleness of the rollouts. Their median is its usual mismatch
    if it has no peers.
    """
    ratios: list[float] = field(default_factory=list)
    """First `USUAL` ratios of the node's mismatch to the expected one."""
    streak: int = 0
    since: int = 0
    policy_version: int = 0
    """Version that the node named for its rollouts of step `since`: a rollout of step k with staleness s is of version
    k - 1 - s.
    """

    def add_point(self, step: int) -> None:
        self.points.append((median(kl for kl, _ in self.pending), fmean(d for _, d in self.pending), step))
        self.pending.clear()
        if len(self.points) == SMOOTHED:
            self.mismatch = max(FLOOR, median(kl for kl, _, _ in self.points))
            self.staleness = fmean(staleness for _, staleness, _ in self.points)
            if len(self.first) < USUAL:
                self.first.append((self.mismatch, self.staleness))

    def explains(self, mismatch: float, staleness: float) -> float:
        """Return the mismatch to expect of this node, derived from the mismatch and staleness of another honest node.
        It is scaled up if this node's rollouts are staler: divergence grows at most quadratically with the number of
        steps, namely if all steps point in one direction."""
        older: float = max(1.0, (1.0 + self.staleness) / (1.0 + staleness))
        return mismatch * older * older


class Lagging:
    """Lag detection for all nodes. Memory is bounded: nodes without a rollout in the last `REMEMBERED` steps are
    forgotten."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._lags: dict[str, Lag] = {}

    @property
    def lags(self) -> tuple[Lag, ...]:
        return tuple(self._lags.values())

    def forget(self, node_id: str) -> None:
        """Forget all values of the node, for example because it reconnected with another engine."""
        self._nodes.pop(node_id, None)
        self._lags.pop(node_id, None)

    def look_again(self, node_id: str) -> None:
        """Forget the node's points and its lag, but keep its usual values for the comparison."""
        self._lags.pop(node_id, None)
        if (node := self._nodes.get(node_id)) is not None:
            node.pending.clear()
            node.points.clear()
            node.mismatch, node.streak = None, 0

    def add(self, step: int, seen: Iterable[Seen], kinds: Mapping[str, str]) -> tuple[Lag, ...]:
        """Process one step's rollouts. Return the lags that begin with them. `kinds`: engine kind (rounding) of each
        node."""
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
            node.kind = kinds[node_id]
            node.add_point(step)
            self._nodes[node_id] = node  # Nodes with the newest points are last.
        for node_id in [one for one, node in self._nodes.items() if node.seen_at < step - REMEMBERED]:
            self.forget(node_id)
        begun = [self._judge(node_id) for node_id in sorted(fresh)]
        return tuple(lag for lag in begun if lag is not None)

    def _judge(self, node_id: str) -> Lag | None:
        """Return the node's lag if its newest point completes one; otherwise None."""
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
        """Return this node's expected mismatch, derived from other nodes of its kind (rounding); None: there are no
        others."""
        others = (
            other
            for other in reversed(self._nodes.values())
            if other is not node and other.kind == node.kind and other.mismatch is not None
        )
        explained = [node.explains(other.mismatch or 0.0, other.staleness) for other in islice(others, PEERS)]
        return median_low(explained) if explained else None
