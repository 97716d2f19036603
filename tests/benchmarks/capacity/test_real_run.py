"""Nodes share the slots; a real run trains its steps and leaves records for the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.capacity.overlap import FAST, SETTINGS
from benchmarks.capacity.real_run import NUM_NODES, Fleet, run


@pytest.mark.parametrize("slots", [2, 7, 40])
def test_all_slots_are_some_nodes(slots: int) -> None:
    fleet = Fleet(slots=slots, token_s=0.1, step_s=1.0)
    widths = [fleet.width(number) for number in range(1, 1 + NUM_NODES)]
    assert sum(widths) == slots
    assert max(widths) - min(widths) <= 1


@pytest.mark.slow
def test_a_run_leaves_complete_records(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    small = {**SETTINGS["training"], "groups_per_step": 2, "group_size": 2, "lora_rank": 2}
    fleet = Fleet(slots=4, token_s=0.02, step_s=0.3)
    books = run({**SETTINGS, "training": small}, fleet, FAST, tmp_path, num_steps=4)
    assert [step.step for step in books.steps][:4] == [1, 2, 3, 4]
    assert books.pace.workload.rollouts_per_step >= 4
    assert books.pace.workload.train_s >= 0.3
    assert len(books.pace.nodes) == NUM_NODES
    # Four slots, 0.02 s per token, and at least one token per rollout.
    assert 0 < sum(node.rollouts_per_s for node in books.pace.nodes) <= 4 / 0.02
