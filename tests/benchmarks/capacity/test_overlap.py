"""The overlap benchmark chooses pools of nodes by what its learner needs, and its results leave out a run's first
steps.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.capacity.overlap import (
    ASYNC,
    CASES,
    FAST,
    KAPPA_2,
    SEQUENTIAL,
    STEPS,
    WARM_UP,
    figures,
)
from echo_hub.config.sections import HubConfig
from echo_hub.core.capacity.model import NodeClass, Workload
from echo_hub.views.pace import RunPace
from echo_shared.records.run import StepRecord
from echo_shared.records.step_figures import SECONDS

PACE = RunPace(
    workload=Workload(
        mode="async", rollouts_per_step=100, train_s=2.0, hand_off_s=0.5, broadcast_s=0.5, max_staleness=2
    ),
    nodes=(NodeClass(name="a", count=1, rollouts_per_s=20.0, latency_s=0.5),) * 2,
    kinds=(),
)
"""Pace of a run whose pool of nodes is exactly large enough: it samples 40 rollouts per second, and the learner needs
100 every 2.5 s.
"""


def test_settings_of_every_case_hold() -> None:
    for case in CASES:
        config = HubConfig.model_validate(case.settings(seed=7))
        assert (config.run.mode, config.run.seed) == (case.mode, 7)
        assert config.training.publish_every == case.publish_every


def test_pools_follow_from_what_is_needed() -> None:
    assert SEQUENTIAL.slots == ASYNC.slots
    assert replace(ASYNC, over=2.4).slots == pytest.approx(2 * ASYNC.slots, abs=1)
    assert KAPPA_2.slots > replace(KAPPA_2, links=FAST).slots, "versions take longer over the slow uplink"


def test_figures_leave_out_the_warm_up() -> None:
    """Slow first steps do not count. In each later step, the learner waits 0.5 s, takes over the batch in 0.5 s and
    trains for 2 s.
    """
    ends = [100.0 * step for step in range(1, WARM_UP + 1)]
    ends += [ends[-1] + 3.0 * after for after in range(1, STEPS + 1 - WARM_UP)]
    row = figures(ASYNC, [_step(number, at) for number, at in enumerate(ends, start=1)], PACE)
    assert row["utilisation"] == pytest.approx(2 / 3)
    assert row["period_s"] == pytest.approx(3.0)
    assert row["predicted"] == pytest.approx(2 / 2.5)
    assert row["pool_over_needed"] == pytest.approx(1.0)


def _step(number: int, trained_at: float) -> StepRecord:
    return StepRecord(
        step=number,
        planned_at=trained_at - 2.5,
        trained_at=trained_at,
        num_groups=10,
        num_rollouts=100,
        num_tokens=400,
        mean_reward=0.5,
        staleness_mean=1.0,
        staleness_max=2,
        figures={SECONDS.key: 2.0},
    )
