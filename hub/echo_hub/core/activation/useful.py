"""Useful output of a node: the rollouts per step that arrive in time, by the provisioning rule
(`echo_hub.core.capacity.rule`) with measured figures.

With a staleness bound of 0 the learner waits for every rollout, so none is late: a node's whole output during a step
counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from echo_hub.core.activation.choice import Floats
from echo_hub.core.capacity.rule import clip_one, in_time


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

    def useful(self, rate: Floats, late_s: Floats) -> Floats:
        """Return the useful rollouts per step of each node, [N].

        A node samples `rate` rollouts a second. `late_s` is the seconds from the training of a version until a rollout
        sampled with it is back.
        """
        step_s, every, bound = self.step_s, self.publish_every, self.max_staleness
        if not bound:
            return rate * step_s
        return in_time(rate, late_s, step_s=step_s, publish_every=every, staleness_bound=bound, clip=np.clip)

    def useful_of(self, rate: float, late_s: float) -> float:
        """Return `useful` of a single node."""
        step_s, every, bound = self.step_s, self.publish_every, self.max_staleness
        if not bound:
            return rate * step_s
        return in_time(rate, late_s, step_s=step_s, publish_every=every, staleness_bound=bound, clip=clip_one)
