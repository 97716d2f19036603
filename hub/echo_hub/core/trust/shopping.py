"""Test of rewards: detect nodes that choose between neighbouring tokens by reward.

A rounding engine may pick either of two tokens if u lies near the edge between them. A node that computes exactly can
try both, return the better paid one, and pass as such an engine. The choice leaves a trace: rollouts with u near an
edge earn more than others. Here u is the uniform number with which the lease's seed fixes the draw of a token.

Fix all tokens that an honest node has sampled, and so its rewards. A token's interval is the range of cumulative
probability within which u draws this token. Then u is uniform in each token's interval, independent of everything
fixed. V counts the rollout's tokens with u near an edge of the interval, or outside, minus Σ m, the count expected of
an exact engine. W = Σ m (1 - m) is the variance (`likelihood.edge_curves`). Rounding sometimes moves u out of a token's
interval, and as many u are missing in the rim inside it, so V of an honest rounding engine has a mean near 0. Let R be
the rollout's rank among the run's latest rewards, within -1 and 1, and x = λ |R| / sqrt(W + `LEAST_VARIANCE`). By
Bennett's inequality (JASA 57, 1962)

    E exp(x sign(R) V) <= exp(W (e**x - 1 - x))

so for each λ of `judging.TILTS` a sum grows by

    x sign(R) V - W (e**x - 1 - x) - TOLERANCE x sqrt(W)

The length of a rollout, its problem, and a learning policy do not change this: all are fixed with the tokens.

`TOLERANCE` covers what two effects of honest rounding leave over. First, the tails of the rounding noise add to V in
proportion to W. So R is measured from the node's own mean rank, weighted like V. Second, the rounded policy may earn
somewhat more than the exact one, and E R V grows by as much. If many nodes of a numerics class fail this test, none is
quarantined (`common_faults`).

Choices among equal rewards change nothing here. The test misses three cases: gains below `TOLERANCE`; unlikely
neighbours, whose narrow intervals have m near 1; and very unsure policies, with several tokens near an edge in every
rollout.
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
"""Correlation that an honest node may have between V (its tokens near an edge, minus the expected number) and R (the
rank of its reward).

Real engines of 8 and 4 bits on the built-in model reach .01 with the task's rewards. They reach .05 with the length,
the likelihood or the variance W as reward. Nodes that use every chance to choose by reward have .15 to .5.
"""
LEAST_VARIANCE: Final = 0.05
"""Term added to the variance of a rollout's number of tokens near an edge, so that rollouts with hardly any such token
weigh little."""
RECENT: Final = 256
"""Number of the run's latest rewards that are kept. Each new reward is ranked among these."""
REMEMBERED: Final = 32.0
"""Sum of weights over which the mean rank of a node's rewards is remembered: at twice this sum, all weights are
halved."""
MOST_WAITING: Final = 16_384
"""Maximum number of rollouts checked but not scored, or scored but not checked. The oldest are forgotten first."""

_Value = TypeVar("_Value")


class Edges(NamedTuple):
    """How many of a rollout's tokens of one node were drawn by a uniform number u near an edge. The edges of a token
    bound the interval of cumulative probability within which u draws this token."""

    node_id: str
    near: float
    """Number of tokens whose u lies near an edge, minus the number expected of an exact engine: V in the module's
    text."""
    variance: float
    """Variance of the number of tokens near an edge, if the node is honest: W in the module's text."""
    counts: Evidence
    """Evidence about the same tokens, only as numbers of tokens by error class, without the large curves."""

    @property
    def spread(self) -> float:
        """Return the standard deviation of `near` under honesty, with `LEAST_VARIANCE` added to the variance."""
        return sqrt(self.variance + LEAST_VARIANCE)


def edges(node_id: str, evidence: Evidence, honest: Honest) -> Edges:
    """Return how many of the tokens behind `evidence` were drawn near an edge, at the rounding scale of the node's
    class."""
    near, variance = evidence.edges_CS[:, honest.draws].tolist()
    return Edges(node_id, near, variance, evidence.counts)


def weigh(found: Edges, excess: float) -> Sums:
    """Return the evidence in nats of one rollout against its node, by alternative; only those from `SHOPPED` on are
    nonzero. `excess`: rank of the reward above the node's usual one (see `UsualRank`)."""
    of_tilts = []
    for tilt in TILTS:
        x = tilt * abs(excess) / found.spread
        allowed = found.variance * (expm1(x) - x) + TOLERANCE * x * sqrt(found.variance)
        of_tilts.append((copysign(x, excess) * found.near - allowed) / DRAWS_DISPERSION)
    return (*NOTHING[: Alternative.SHOPPED], *of_tilts)


@dataclass(slots=True, eq=False)
class UsualRank:
    """Mean rank of the rewards of one node's rollouts, within -1 and 1. Rollouts with more tokens near edges weigh
    more. The mean starts at 0, the middle."""

    total: float = 0.0
    weight: float = 1.0

    def excess(self, rank: float, found: Edges) -> float:
        """Return the rollout's rank minus the mean of earlier ranks, within -1 and 1. Add the rank to the mean."""
        excess = max(-1.0, min(1.0, rank - self.total / self.weight))
        weight = found.variance / found.spread
        self.total += weight * rank
        self.weight += weight
        if self.weight > 2.0 * REMEMBERED:
            self.total, self.weight = self.total / 2.0, self.weight / 2.0
        return excess


class LatestRewards:
    """The run's latest rewards, among which each new reward is ranked."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []

    def rank(self, reward: float) -> float:
        """Return the share of the latest `RECENT` rewards that are lower than this one, minus the share that are
        higher. Add the reward to them."""
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
    """Brings together the check and the reward of each rollout, in whichever order they come."""

    def __init__(self) -> None:
        self._ranks = LatestRewards()
        self._checked: OrderedDict[str, tuple[Edges, ...]] = OrderedDict()
        self._scored: OrderedDict[str, float] = OrderedDict()

    def checked(self, rollout_id: str, found: Sequence[Edges]) -> float | None:
        """Store the finding of a rollout's check. Return the rank of its reward; None: it is not scored yet."""
        rank = self._scored.pop(rollout_id, None)
        telling = tuple(one for one in found if one.variance > 0.0)
        if rank is None and telling:
            _keep(self._checked, rollout_id, telling)
        return rank

    def scored(
        self, rollout_ids: Iterable[str], reward: float, under_check: Container[str]
    ) -> tuple[float, list[tuple[str, tuple[Edges, ...]]]]:
        """Rank the reward of an episode with the turns `rollout_ids`. Return the rank, and the findings of its turns
        whose check has ended.

        `under_check`: rollouts whose check has not ended; their rank is stored until it ends.
        """
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
