"""Sizing of runs, and evaluation of their records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.capacity.overlap import (
    ASYNC,
    CASES,
    ENOUGH_CASES,
    KAPPA_2,
    SEEN,
    SEQUENTIAL,
    SLOTS_SEEN,
    STEPS,
    WARM_UP,
    Case,
    Sizing,
    figures,
    headline,
    plan,
)
from benchmarks.capacity.real_run import Books
from benchmarks.harness.processes import RunFailed
from echo_hub.config.sections import HubConfig
from echo_hub.core.capacity.advice import times_as_many
from echo_hub.core.capacity.model import NodeClass, Workload
from echo_hub.views.pace import Pace
from echo_shared.books import StepRecord
from echo_shared.step_figures import SECONDS

PACE = Pace(
    workload=Workload(
        mode="async", rollouts_per_step=100, train_s=2.0, hand_off_s=0.5, broadcast_s=0.5, max_staleness=2
    ),
    nodes=(NodeClass(name="a", count=1, rollouts_per_s=20.0, latency_s=0.5),) * 2,
    kinds=(),
)
"""It needs exactly these nodes: 100 rollouts every 2.5 s."""


def test_every_case_is_planned_and_has_valid_settings() -> None:
    assert len({case.name for case in plan()}) == len(CASES)
    for case in CASES:
        config = HubConfig.model_validate(case.settings(seed=7))
        assert (config.run.mode, config.run.seed) == (case.mode, 7)
        assert config.training.publish_every == case.publish_every
    assert {case.over for case in CASES} == {0.7, 0.8, 1.0, 1.2}
    assert len(ENOUGH_CASES) == 3


def test_the_first_run_is_sized_by_the_assumed_pace() -> None:
    needed = times_as_many(replace(SEEN.workload, max_staleness=2), SEEN.nodes, 1.0)
    assert needed is not None
    assert Sizing().slots(ASYNC) == round(SLOTS_SEEN * needed * 1.2)


def test_a_run_is_sized_by_those_before() -> None:
    sizing, first = Sizing(), Case(over=0.5, max_staleness=2)
    sizing.see(first, 30, PACE)
    assert sizing.slots(Case(over=0.6, max_staleness=2)) == 18
    slow = replace(PACE.workload, train_s=4.5)  # Half of the nodes suffice; their present yield does not matter.
    sizing.see(first, 18, Pace(workload=slow, nodes=(), kinds=()))
    assert sizing.slots(Case(over=0.8, max_staleness=2)) == 12


def test_sequential_and_asynchronous_runs_have_the_same_pool() -> None:
    sizing = Sizing()
    slots = sizing.slots(ASYNC)
    sizing.see(ASYNC, slots, PACE)
    assert sizing.slots(SEQUENTIAL) == slots


def test_a_slower_uplink_takes_longer() -> None:
    far = replace(PACE, workload=replace(PACE.workload, broadcast_s=1.3))
    found = []
    for case in (KAPPA_2, replace(KAPPA_2, links=ASYNC.links)):
        sizing = Sizing()
        sizing.see(ASYNC, 30, far)
        found.append(sizing.slots(case))
    assert found[0] > found[1]
    sizing.see(ASYNC, 30, replace(PACE, workload=replace(PACE.workload, broadcast_s=60.0)))
    with pytest.raises(RunFailed, match="no pool is enough"):
        sizing.slots(Case(over=1.2, max_staleness=1))


def test_figures_leave_out_the_warm_up() -> None:
    """Take four slow steps; later ones have 0.5 s of waiting, 0.5 s of hand-off and 2 s of training each."""
    ends = [100.0 * step for step in range(1, WARM_UP + 1)]
    ends += [ends[-1] + 3.0 * after for after in range(1, STEPS + 1 - WARM_UP)]
    books = Books(steps=tuple(_step(number, at) for number, at in enumerate(ends, start=1)), pace=PACE)
    row = figures(ASYNC, 30, books)
    assert row["utilisation"] == pytest.approx(2 / 3)
    assert row["waits_for_rollouts"] == pytest.approx(0.5 / 3)
    assert row["period_s"] == pytest.approx(3.0)
    assert row["predicted"] == pytest.approx(2 / 2.5)
    assert row["pool_over_needed"] == pytest.approx(1.0)


def test_headline() -> None:
    def row(case: Case, utilisation: float, predicted: float, period_s: float = 1.0) -> dict[str, object]:
        periods = {"period_s": period_s, "predicted_period_s": period_s + 1}
        return {
            "case": case.name,
            "utilisation": utilisation,
            "predicted": predicted,
            "pool_over_needed": 1.2,
            **periods,
        }

    rows = [
        row(CASES[0], 0.5, 0.56),
        row(ASYNC, 0.97, 0.99, 2.0),
        row(SEQUENTIAL, 0.4, 0.41, 5.0),
        row(KAPPA_2, 0.96, 0.98),
    ]
    found = headline(rows)
    assert found["max_prediction_error"] == pytest.approx(0.06)
    assert found["async_speedup"] == pytest.approx(5 / 2)
    assert found["async_speedup_model"] == pytest.approx(6 / 3)
    assert (found["utilisation_when_enough"], found["kappa_2_utilisation"], found["kappa_2_predicted"]) == (
        0.96,
        0.96,
        0.98,
    )
    assert found["pool_when_enough"] == 1.2
    assert set(headline([]).values()) == {None}


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
