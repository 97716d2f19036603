"""Is the learner kept busy? The question's numbers, and a pool of nodes as the rollouts that it yields in time.

After the overlap-based capacity model of ECHO-2 (arXiv 2602.02192), for the way in which this hub leases:

- The learner plans a step as soon as R fresh rollouts are there, and takes T = T_train + hand-off for it. Step k turns
  version k - 1 into k and may consume rollouts of the versions from k - 1 - S on.
- Every kappa-th version is published, and is with the nodes T_bcast after it was trained, or after the version before
  it was with them, whichever is later: one version is sent after the other.
- A node samples all the time, by the newest version that it has: it does not wait for the next one, as ECHO-2's do
  ("publish and wait").
- Of version m·kappa no more is leased than the steps to m·kappa + S + 1 take: AReaL's rule of admission (arXiv
  2505.24298, section 5.1). While there is more throughput than the learner takes, each version so feeds just the kappa
  steps that end with step m·kappa + S + 1.

A node of throughput mu and latency l (from lease to receipt, of its slow rollouts) that got a version t seconds ago has
by now returned mu · (t - l/2) rollouts of it, and none before t = l. For its slots are partly free when the version
arrives and partly half-way through older work; and at any moment those under way are half done. It is mu · t where all
nodes stand still as a version arrives, which they do where S = 0. A version has its node for no longer than until the
next one arrives, C later, and so yields mu · C at most. The pool's supply is the sum, F(t, C).

With steps T apart version m·kappa, trained at 0, feeds the steps planned at (S - kappa + j) T, j = 1 .. kappa. So the
learner never waits where

    kappa T >= T_bcast   and   F((S - kappa + j) T - T_bcast, kappa T) >= j R   for j = 1 .. kappa

The last of these, with no latency and S = kappa, is ECHO-2's rule of provisioning, sum of mu >= kappa R / (kappa T -
T_bcast). It is not enough by itself: with kappa > 1 the first step after an old version has expired needs R rollouts of
the next one, however many come later. Where it does wait, what follows is late too, and `schedule` has the period.

Assumed: latency and throughput of a node are what they were of late, whoever else is there; nobody comes or goes; a
version reaches all nodes at once; scoring takes no time. Rollouts are counted one by one, not in groups: their lengths
matter through the latency alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Mode = Literal["colocated", "sequential", "async"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeClass:
    """Nodes that do the same. `rollouts_per_s` is one node's, while it has work."""

    name: str
    count: int
    rollouts_per_s: float
    latency_s: float
    """From the lease to the receipt, of its slow rollouts: nine of ten are faster."""
    cost_per_h: float = 0.0
    """What one of them costs; 0 = a gift."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the learner takes, and how soon nodes have what it makes. In co-located mode the nodes are the hub's own
    sampler."""

    mode: Mode
    rollouts_per_step: float
    train_s: float
    broadcast_s: float = 0.0
    """From a version's training to when nodes sample by it."""
    hand_off_s: float = 0.0
    """What a step takes of the learner's time beside training: the plan's commit, the batch's way to it."""
    max_staleness: int = 0
    """Async mode's; 0 in the others."""
    publish_every: int = 1
    """At most the staleness bound + 1, or nothing is fresh enough."""

    @property
    def step_s(self) -> float:
        """The shortest time from step to step."""
        return self.train_s + self.hand_off_s

    @property
    def staleness_bound(self) -> int:
        return self.max_staleness if self.mode == "async" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """How a workload and a pool get on with each other. Shares lie in 0..1."""

    busy: bool
    """The learner never waits for rollouts."""
    period_s: float
    """From step to step, on average; infinite where nobody samples."""
    utilisation: float
    """Share of the time in which the learner trains."""
    rollouts_per_s: float
    """What the nodes could yield, if they were never late."""
    needed_per_s: float
    """What the learner takes while it never waits."""

    @property
    def idle(self) -> float:
        """Share of the time in which the learner does not train."""
        return 1 - self.utilisation

    @property
    def missing_per_s(self) -> float:
        """Throughput that is missing however late it comes; where none is and the learner waits, it comes too late."""
        return max(0.0, self.needed_per_s - self.rollouts_per_s)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Nodes in the order of their latencies: one entry a class."""

    latencies: NDArray[np.float64]
    rates: NDArray[np.float64]
    """Rollouts a second, of all nodes of the class."""

    @classmethod
    def of(cls, classes: Iterable[NodeClass]) -> Pool:
        rows = [(one.latency_s, one.rollouts_per_s * one.count) for one in classes if one.count]
        table = np.array(rows, dtype=np.float64).reshape(-1, 2)
        table = table[table[:, 0].argsort(kind="stable")]
        return cls(latencies=table[:, 0], rates=table[:, 1])

    def plus(self, added: NodeClass) -> Pool:
        """The pool with these nodes too."""
        place = int(self.latencies.searchsorted(added.latency_s))
        rate = added.rollouts_per_s * added.count
        return Pool(
            latencies=np.insert(self.latencies, place, added.latency_s), rates=np.insert(self.rates, place, rate)
        )

    @property
    def rollouts_per_s(self) -> float:
        return float(self._sums[0][-1])

    def supply(self, after_s: float, lasts_s: float, *, rested: bool) -> float:
        """Rollouts of a version that have come in so long after it arrived; it was the newest for `lasts_s`.
        `rested`: nodes had nothing else to do when it arrived."""
        rates, halves = self._sums
        in_time = int(self.latencies.searchsorted(after_s, "right"))
        if rested:
            return float(rates[in_time]) * max(0.0, min(after_s, lasts_s))
        full = int(self.latencies.searchsorted(min(after_s, 2 * (after_s - lasts_s)), "right"))
        partly = float(rates[in_time] - rates[full]) * after_s - float(halves[in_time] - halves[full])
        return (float(rates[full]) * lasts_s if full else 0.0) + partly

    @cached_property
    def _sums(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Of the first n classes: rates, and rates times half the latency."""
        begin = np.zeros(1)
        return (
            np.concatenate((begin, self.rates.cumsum())),
            np.concatenate((begin, (self.rates * self.latencies / 2).cumsum())),
        )
