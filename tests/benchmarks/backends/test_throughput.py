"""Ratios compare neighbouring runs; workloads fill every width."""

from __future__ import annotations

import pytest

from benchmarks.backends.engine_process import Run
from benchmarks.backends.throughput import WIDTHS, Cell, mid_workload, tiny_workload


def test_ratios_are_the_medians_of_neighbours() -> None:
    runs = [Run(seconds=seconds, rollouts=[]) for seconds in (1.0, 2.0, 4.0)]
    cell = Cell(backend="llama_cpp", precision="f32", width=8, runs=runs)
    assert cell.over_ceiling is None
    cell.ceilings = [0.9, 1.0, 3.6]
    assert cell.over_ceiling == pytest.approx(0.9)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_has_more_work_than_fits_at_once(width: int) -> None:
    for workload in (tiny_workload(0), mid_workload(0)):
        groups = workload(width)
        assert sum(len(group.indices) for group in groups) > width
        assert len({group.lease_id for group in groups}) == len(groups)
