"""What a node brings back in time: its term of the provisioning rule (`echo_hub.core.capacity.rule`), from what was
measured of it.

With S = 0 every rollout waits for its version, the rule says nothing, and a whole step of what a node samples counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from echo_hub.core.activation.choice import Floats
from echo_hub.core.capacity.rule import clip_one, in_time


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
        step_s, every, bound = self.step_s, self.publish_every, self.max_staleness
        if not bound:
            return rate * step_s
        return in_time(rate, late_s, step_s=step_s, publish_every=every, staleness_bound=bound, clip=np.clip)

    def useful_of(self, rate: float, late_s: float) -> float:
        """The same of one node."""
        step_s, every, bound = self.step_s, self.publish_every, self.max_staleness
        if not bound:
            return rate * step_s
        return in_time(rate, late_s, step_s=step_s, publish_every=every, staleness_bound=bound, clip=clip_one)
