"""Capacity model: does a pool of nodes keep the learner busy? This module has the figures of the workload, and the
pool's supply of rollouts over time.

R is the number of rollouts per step, S the staleness bound, kappa the number of steps between publications, and T_bcast
the time from the training of a version until nodes sample with it. The model follows the overlap-based capacity model
of ECHO-2 (arXiv 2602.02192), adapted to this hub's leasing:

- The learner plans a step once R fresh rollouts are present, and takes T = T_train + hand-off for it. Step k turns
  version k - 1 into k and may consume rollouts of versions k - 1 - S and newer.
- Every kappa-th version is published. It reaches the nodes T_bcast after training, or T_bcast after the previous
  version, whichever is later: versions are sent one after the other.
- Nodes sample all the time with their newest version. ECHO-2's nodes instead wait for the next version ("publish and
  wait").
- Leases of version m·kappa are limited to the demand of the steps up to m·kappa + S + 1, by AReaL's admission rule
  (arXiv 2505.24298, section 5.1). So while throughput exceeds demand, each version feeds exactly the kappa steps that
  end with step m·kappa + S + 1.

Take a node of throughput mu and latency l (from lease to receipt, of its slow rollouts) that got a version t seconds
ago. It has returned mu · (t - l/2) rollouts of the version, and none before t = l. When the version arrives, some slots
are free and others half-way through older work; on average, running rollouts are half done. If all nodes idle when a
version arrives (S = 0), the count is mu · t. A version is a node's newest for C seconds, so it yields at most mu · C.
The pool's supply F(t, C) is the sum over nodes.

With steps T apart, version m·kappa, trained at 0, feeds the steps planned at (S - kappa + j) T, j = 1 .. kappa. So the
learner never waits if

    kappa T >= T_bcast   and   F((S - kappa + j) T - T_bcast, kappa T) >= j R   for j = 1 .. kappa

The last condition, with no latency and S = kappa, is ECHO-2's provisioning rule: sum of mu >= kappa R / (kappa T -
T_bcast). Alone it does not suffice. With kappa > 1, the first step after an old version expires needs R rollouts of the
next version in time. If the learner does wait, later steps shift as well; `schedule` computes the resulting period.

Assumptions: latency and throughput of a node stay as recently measured. No node joins or leaves. A version reaches all
nodes at once. Scoring takes no time. Single rollouts are counted instead of groups, so lengths matter only through the
latency.
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
    """Nodes with equal figures. `rollouts_per_s` is the throughput of one busy node."""

    name: str
    count: int
    rollouts_per_s: float
    latency_s: float
    """90th percentile of the seconds from lease to receipt of a rollout."""
    cost_per_h: float = 0.0
    """Cost of one node in US dollars per hour; 0 = none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The learner's demand and the delay of its versions. In co-located mode the hub's own sampler is the only node."""

    mode: Mode
    rollouts_per_step: float
    train_s: float
    broadcast_s: float = 0.0
    """Seconds from the training of a version until nodes sample with it."""
    hand_off_s: float = 0.0
    """Learner's time per step besides training: commit of the plan and transfer of the batch."""
    max_staleness: int = 0
    """Staleness bound of the run in async mode; 0 in the other modes."""
    publish_every: int = 1
    """Steps between publications. It must be at most the staleness bound + 1: otherwise every published version would
    be too old for some steps.
    """

    @property
    def step_s(self) -> float:
        """Return the seconds from step to step of a learner that never waits for rollouts."""
        return self.train_s + self.hand_off_s

    @property
    def staleness_bound(self) -> int:
        return self.max_staleness if self.mode == "async" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted performance of a pool of nodes on a workload. All shares are between 0 and 1."""

    busy: bool
    """True if the learner never waits for rollouts."""
    period_s: float
    """Average seconds from step to step; infinite if no node samples."""
    utilisation: float
    """Share of time in which the learner trains."""
    rollouts_per_s: float
    """Rollouts per second that all nodes sample together, whether a rollout arrives in time or not."""
    needed_per_s: float
    """Rollouts per second that a learner consumes if it never waits."""

    @property
    def idle(self) -> float:
        """Return the share of time in which the learner does not train."""
        return 1 - self.utilisation

    @property
    def missing_per_s(self) -> float:
        """Return by how many rollouts per second the nodes are too slow, regardless of lateness.

        If it is 0 and the learner still waits, rollouts come too late.
        """
        return max(0.0, self.needed_per_s - self.rollouts_per_s)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Nodes as arrays [classes], in order of latency: one entry per class of equal nodes."""

    latencies: NDArray[np.float64]
    rates: NDArray[np.float64]
    """Total rollouts per second of each class."""

    @classmethod
    def of(cls, classes: Iterable[NodeClass]) -> Pool:
        rows = [(one.latency_s, one.rollouts_per_s * one.count) for one in classes if one.count]
        table = np.array(rows, dtype=np.float64).reshape(-1, 2)
        table = table[table[:, 0].argsort(kind="stable")]
        return cls(latencies=table[:, 0], rates=table[:, 1])

    def plus(self, added: NodeClass) -> Pool:
        place = int(self.latencies.searchsorted(added.latency_s))
        rate = added.rollouts_per_s * added.count
        return Pool(
            latencies=np.insert(self.latencies, place, added.latency_s), rates=np.insert(self.rates, place, rate)
        )

    @property
    def rollouts_per_s(self) -> float:
        return float(self._sums[0][-1])

    def supply(self, after_s: float, lasts_s: float, *, rested: bool) -> float:
        """Return how many rollouts of a version have arrived `after_s` seconds after the version reached the nodes.

        `lasts_s`: seconds until the nodes get the next version. `rested`: True if all nodes were idle when the version
        arrived.
        """
        rates, halves = self._sums
        in_time = int(self.latencies.searchsorted(after_s, "right"))
        if rested:
            return float(rates[in_time]) * max(0.0, min(after_s, lasts_s))
        full = int(self.latencies.searchsorted(min(after_s, 2 * (after_s - lasts_s)), "right"))
        partly = float(rates[in_time] - rates[full]) * after_s - float(halves[in_time] - halves[full])
        return (float(rates[full]) * lasts_s if full else 0.0) + partly

    @cached_property
    def _sums(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return cumulative sums over the first n classes, n = 0 .. classes: rates, and rates times half the
        latency."""
        begin = np.zeros(1)
        return (
            np.concatenate((begin, self.rates.cumsum())),
            np.concatenate((begin, (self.rates * self.latencies / 2).cumsum())),
        )
