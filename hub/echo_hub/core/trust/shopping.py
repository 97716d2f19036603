"""Test of rewards: does a node choose among neighbouring tokens by what they earn?

An engine that rounds may draw either of two tokens where u lies near the edge between them. A node that computes
exactly can try both, return the one that earns more, and pass for such an engine. The choice leaves a trace: the
rollouts of which u was near an edge earn more than the others.

Fix all tokens that an honest node has drawn, and so its rewards. u is then uniform in each token's interval, and
independent of all else. V counts the tokens of a rollout of which u lies near an edge of the interval, or outside. The
number expected of an exact engine, Σ m, is taken from that. W = Σ m (1 - m) is the variance (`likelihood.edge_curves`).
An engine that rounds moves as many u out of the interval as it keeps out of the rim inside, so its V has a mean near 0.
Let R be the rollout's rank among the run's latest rewards, within -1 and 1, and x = λ |R| / sqrt(W + `LEAST_VARIANCE`).
By Bennett's inequality (JASA 57, 1962)

    E exp(x sign(R) V) <= exp(W (e**x - 1 - x))

so for each λ of `judging.TILTS` a sum is raised by

    x sign(R) V - W (e**x - 1 - x) - TOLERANCE x sqrt(W)

Neither the length of a rollout, nor its problem, nor a policy that learns changes this: all are fixed with the tokens.

Two effects of an honest engine's rounding are left, and `TOLERANCE` is for them. Its tails add to V in proportion to W,
so R counts from the node's own mean rank, weighted like V. And the policy that it rounds to may earn somewhat more than
the exact one: E R V then grows by as much. A class of which many nodes fail is spared as usual (`common_faults`).

To choose among equals changes nothing here. What the test leaves: gains below `TOLERANCE`; unlikely neighbours, whose
narrow intervals have m near 1; and policies so unsure that every rollout has several tokens near an edge.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from math import copysign, expm1, sqrt
from typing import Final, NamedTuple, TypeVar

from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.judging import DRAWS_DISPERSION, NOTHING, TILTS, Alternative, Sums
from echo_hub.core.trust.numerics import Honest

TOLERANCE: Final = 0.075
"""Correlation of V and R that an honest node may have. Real engines of 8 and 4 bits on the built-in model reach .01
with the task's rewards, and .05 with the length, the likelihood or W as reward. Shoppers that take every chance have
.15 to .5."""
LEAST_VARIANCE: Final = 0.05
"""Keeps a rollout of which hardly any token tells something from weighing much."""
RECENT: Final = 256
"""Rewards of the run among which a new one is ranked."""
REMEMBERED: Final = 32.0
"""Sum of weights of a node's mean rank of which half is forgotten at twice as much."""
MOST_WAITING: Final = 16_384
"""Rollouts that are checked and not scored, or scored and not checked. The oldest are forgotten first."""

_Value = TypeVar("_Value")


class Edges(NamedTuple):
    """What a rollout shows of the edges of one node's tokens."""

    node_id: str
    near: float
    """V."""
    variance: float
    """W."""
    counts: Evidence
    """Of the same tokens, without curves."""

    @property
    def spread(self) -> float:
        """V's standard deviation, bounded below."""
        return sqrt(self.variance + LEAST_VARIANCE)


def edges(node_id: str, evidence: Evidence, honest: Honest) -> Edges:
    """Read `evidence` at the scale of the node's class."""
    near, variance = evidence.edges_CS[:, honest.draws].tolist()
    return Edges(node_id, near, variance, evidence.counts)


def weigh(found: Edges, excess: float) -> Sums:
    """Nats that a rollout of this `excess` (see `UsualRank`) weighs against its node, by alternative."""
    of_tilts = []
    for tilt in TILTS:
        x = tilt * abs(excess) / found.spread
        allowed = found.variance * (expm1(x) - x) + TOLERANCE * x * sqrt(found.variance)
        of_tilts.append((copysign(x, excess) * found.near - allowed) / DRAWS_DISPERSION)
    return (*NOTHING[: Alternative.SHOPPED], *of_tilts)


@dataclass(slots=True, eq=False)
class UsualRank:
    """Mean rank of one node's rollouts, weighted as V is. Begins at the middle."""

    total: float = 0.0
    weight: float = 1.0

    def excess(self, rank: float, found: Edges) -> float:
        """Return how far a rollout's rank is above the mean of those before, within -1 and 1; and add it to these."""
        excess = max(-1.0, min(1.0, rank - self.total / self.weight))
        weight = found.variance / found.spread
        self.total += weight * rank
        self.weight += weight
        if self.weight > 2.0 * REMEMBERED:
            self.total, self.weight = self.total / 2.0, self.weight / 2.0
        return excess


class Ranks:
    """The run's latest rewards."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []

    def rank(self, reward: float) -> float:
        """Return the share of `RECENT` rewards that are lower, less the share that are higher; and add this one."""
        found = 0.0
        if self._sorted:
            lower = bisect_left(self._sorted, reward)
            higher = len(self._sorted) - bisect_right(self._sorted, reward)
            found = (lower - higher) / len(self._sorted)
        self._latest.append(reward)
        insort(self._sorted, reward)
        if len(self._latest) > RECENT:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]
        return found


class Shopping:
    """Brings each rollout's check and its reward together, whichever comes first."""

    def __init__(self) -> None:
        self._ranks = Ranks()
        self._checked: OrderedDict[str, tuple[Edges, ...]] = OrderedDict()
        self._scored: OrderedDict[str, float] = OrderedDict()

    def checked(self, rollout_id: str, found: Sequence[Edges]) -> float | None:
        """Take what a check has found. Return the rank of the reward; None: it is not scored yet."""
        rank = self._scored.pop(rollout_id, None)
        telling = tuple(one for one in found if one.variance > 0.0)
        if rank is None and telling:
            _keep(self._checked, rollout_id, telling)
        return rank

    def scored(
        self, rollout_ids: Iterable[str], reward: float, under_check: Container[str]
    ) -> tuple[float, list[tuple[str, tuple[Edges, ...]]]]:
        """Take the reward of an episode, whose turns are `rollout_ids`. Return its rank, and what the checks have found
        of the turns. `under_check`: rollouts of which the check is on its way."""
        rank, found = self._ranks.rank(reward), []
        for rollout_id in rollout_ids:
            if rollout_id in under_check:
                _keep(self._scored, rollout_id, rank)
            elif (known := self._checked.pop(rollout_id, None)) is not None:
                found.append((rollout_id, known))
        return rank, found


def _keep(kept: OrderedDict[str, _Value], rollout_id: str, value: _Value) -> None:
    kept[rollout_id] = value
    if len(kept) > MOST_WAITING:
        kept.popitem(last=False)
