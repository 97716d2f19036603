"""The learner's demand, and the cheapest set of nodes that covers it within a budget: a covering knapsack with one row,
solved by price per rollout.

    node   cost per hour   rollouts per step   price per rollout
    a      0.30            6                   0.050
    b      0.40            5                   0.080
    c      0.90            9                   0.100

For eight rollouts per step, a and then b are taken. The linear relaxation of this problem takes nodes in order of price
per rollout, and only a fraction of the last one. Here the last node is taken whole: the cheapest one that covers the
remaining need. Then nodes made superfluous are removed. So the cost exceeds the relaxation's, a lower bound, by less
than one node's price.

The choice takes one numpy pass over all nodes, and up to `FILLS` shorter ones: about 20 ms for 100,000 nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.capacity.rule import Each, in_time

FILLS: Final = 64
"""Limit on one choice: the number of nodes that it adds while budget is left, and the number that it removes as
superfluous.
"""

NOTHING: Final = 1e-9
"""Contributions in rollouts per step up to this size count as zero."""

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The learner's demand for rollouts."""

    rollouts_per_step: float
    step_s: float
    max_staleness: int
    publish_every: int

    @property
    def need(self) -> float:
        """Return the rollouts per step that keep the learner busy; infinite with a staleness bound of 0, where more
        rollouts per second always shorten the step."""
        return self.rollouts_per_step if self.max_staleness else inf

    def useful(self, rate: Each, late_s: Each) -> Each:
        """Return the rollouts per step that arrive early enough for a step that may use them, of one node or of each,
        [N]: see `core.capacity.rule.in_time`. With a staleness bound of 0 the learner waits for every rollout, so all
        count.

        A node samples `rate` rollouts a second. `late_s`: seconds from the training of a version to the arrival of a
        rollout sampled with this version.
        """
        step_s, every, bound = self.step_s, self.publish_every, self.max_staleness
        if not bound:
            return rate * step_s
        return in_time(rate, late_s, step_s=step_s, publish_every=every, staleness_bound=bound)


def cheapest(useful: Floats, cost: Floats, *, need: float, budget: float, price: Floats | None = None) -> Bools:
    """Return the nodes to take, as a mask [N].

    `useful`: rollouts per step of each node, at least 0. `cost`: price of each node, above 0; chosen nodes together
    cost at most `budget`. `price`: order in which nodes are taken, smallest first; default: cost / useful. If the
    budget does not suffice to reach `need`, return the best-priced nodes that fit into it.
    """
    chosen = np.zeros(len(cost), bool)
    usable = np.flatnonzero((useful > NOTHING) & (cost <= budget))
    if need <= 0 or not len(usable):
        return chosen
    ranks = cost[usable] / useful[usable] if price is None else price[usable]
    order = usable[np.argsort(ranks, kind="stable")]
    brought, spent = useful[order].cumsum(), cost[order].cumsum()
    enough = int(brought.searchsorted(need))
    within = int(spent.searchsorted(budget, "right"))
    if enough < within:
        _cover(chosen, order, enough, useful, cost, need, budget)
    else:
        chosen[order[:within]] = True
        _squeeze_in(chosen, order[within:], useful, cost, need, budget)
    return chosen


def _cover(
    chosen: Bools, order: NDArray[np.intp], last: int, useful: Floats, cost: Floats, need: float, budget: float
) -> None:
    """Choose all nodes of `order` before position `last`, and of the others the cheapest that covers the remaining
    need. Then drop superfluous nodes, the most expensive first."""
    chosen[order[:last]] = True
    rest = order[last:]
    missing = need - useful[order[:last]].sum()
    left = budget - cost[order[:last]].sum()
    able = rest[(useful[rest] >= missing) & (cost[rest] <= left)]
    chosen[able[cost[able].argmin()] if len(able) else rest[0]] = True
    spare = useful[chosen].sum() - need
    taken = np.flatnonzero(chosen)
    for _ in range(FILLS):
        idle = taken[useful[taken] <= spare]
        if not len(idle):
            return
        dearest = idle[cost[idle].argmax()]
        chosen[dearest] = False
        spare -= useful[dearest]
        taken = taken[taken != dearest]


def _squeeze_in(
    chosen: Bools, rest: NDArray[np.intp], useful: Floats, cost: Floats, need: float, budget: float
) -> None:
    """Choose further nodes from `rest`, in order, that fit into the remaining budget, until the need is met."""
    missing, left = need - useful[chosen].sum(), budget - cost[chosen].sum()
    for _ in range(FILLS):
        rest = rest[cost[rest] <= left]
        if missing <= 0 or not len(rest):
            return
        chosen[rest[0]] = True
        missing -= useful[rest[0]]
        left -= cost[rest[0]]
        rest = rest[1:]
