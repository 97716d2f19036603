from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.papers.batches import QUANTISED
from benchmarks.papers.cases import COLOCATED, SEQUENTIAL, Case, smaller
from benchmarks.papers.echo import FAR
from benchmarks.papers.ran import Ran, carry_out
from benchmarks.papers.small import LARGE
from tests.benchmarks.papers.toy import ran

SIZES = {
    "training": {"steps": 2, "groups_per_step": 2, "group_size": 2},
    "evaluation": {"problems": 4},
}


def small(case: Case) -> Ran:
    return carry_out(replace(smaller(case, SIZES), evaluate_every=1), 1)


def test_steps_to_a_target_lie_between_two_points() -> None:
    run = ran(0.2, 0.4, 0.8, 0.6)
    assert run.steps_to(0.6, evaluate_every=10) == pytest.approx(15)
    assert run.steps_to(0.1, evaluate_every=10) == 0
    assert run.steps_to(0.9, evaluate_every=10) == float("inf")
    assert run.accuracy == 0.6


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_sequential_is_colocated_and_far_nodes_wait_for_the_way() -> None:
    colocated, sequential = small(COLOCATED), small(SEQUENTIAL)
    assert sequential.points == colocated.points
    assert [point.trained_rollouts for point in colocated.points] == [0, 4, 8]
    assert all("grad_norm" in step for step in colocated.steps) and len(colocated.steps) == 2
    far = small(replace(FAR[300], delay_s=30.0))
    assert far.utilisation is not None and far.utilisation < 0.2
    assert colocated.utilisation is not None and colocated.utilisation > 0.6


def test_an_untrained_base_has_a_single_point() -> None:
    run = small(LARGE)
    assert len(run.points) == 1 and not run.steps and 0 <= run.accuracy <= 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_quantised_fleet_samples_with_its_own_weights() -> None:
    larger = {**SIZES, "training": {**SIZES["training"], "group_size": 8}}
    run = carry_out(replace(smaller(QUANTISED["q4_k_m"], larger), evaluate_every=1), 1)
    found = [step["mismatch_kl"] for step in run.steps if "mismatch_kl" in step]
    assert any(one > 1e-7 for one in found), "a step whose groups have an advantage"
