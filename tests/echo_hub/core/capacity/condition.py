"""The no-wait condition of `echo_hub.core.capacity.model` by direct computation, to check the model's predictions."""

from __future__ import annotations

from echo_hub.core.capacity.model import Pool, Workload
from echo_hub.core.capacity.schedule import SAME


def never_waits(workload: Workload, pool: Pool) -> bool:
    """Return True if the learner never waits for rollouts. Exact for equal latencies, otherwise sometimes False
    although the learner never waits.
    """
    every, step_s, spread_s = workload.publish_every, workload.step_s, workload.broadcast_s
    if every * step_s < spread_s:
        return False
    return all(
        pool.supply((workload.staleness_bound - every + place) * step_s - spread_s, every * step_s, rested=False)
        >= place * workload.rollouts_per_step * (1 - SAME)
        for place in range(1, every + 1)
    )
