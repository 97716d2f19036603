"""What a node brings back in time: the provisioning rule's share of one node, from what was measured of it.

Version v is trained at vT, with the node `behind_s` later, and of use for rollouts that begin before (v + S) T less
what a rollout takes, `latency_s`; and no longer than until the next version comes, kappa T later. A node that samples
mu rollouts a second so brings, a step,

    mu min(kappa T, max(0, S T - behind - latency)) / kappa

and the learner is kept busy if all of them together bring the R that a step takes (ECHO-2, arXiv 2602.02192, with a
window of S T). With S = 0 every rollout waits for its version, and the whole of what is left of a step counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from echo_hub.core.activation.choice import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the learner takes."""

    rollouts_per_step: float
    step_s: float
    max_staleness: int
    publish_every: int

    @property
    def need(self) -> float:
        """Rollouts a step that keep the learner busy; infinite where it waits for each version's, however many come."""
        return self.rollouts_per_step if self.max_staleness else inf

    def useful(self, rate: Floats, late_s: Floats) -> Floats:
        """Rollouts a step, [N], of nodes that sample `rate` a second and bring them back `late_s` after their version
        was trained: its way to them, and a rollout's own time."""
        period_s = self.publish_every * self.step_s
        if self.max_staleness == 0:
            return rate * self.step_s
        in_time_s = np.clip(self.max_staleness * self.step_s - late_s, 0.0, period_s)
        useful: Floats = rate * in_time_s / self.publish_every
        return useful

    def useful_of(self, rate: float, late_s: float) -> float:
        """The same of one node."""
        period_s = self.publish_every * self.step_s
        if self.max_staleness == 0:
            return rate * self.step_s
        return rate * min(period_s, max(0.0, self.max_staleness * self.step_s - late_s)) / self.publish_every
