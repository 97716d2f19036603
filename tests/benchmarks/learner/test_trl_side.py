from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness.models import Shape
from benchmarks.harness.progress import Planned, Progress
from benchmarks.learner import compare
from benchmarks.learner.cases import CASES, make_batch

pytest.importorskip("trl")

SHAPE = Shape(hidden=64, layers=2, heads=1, key_value_heads=1, head_dim=64, intermediate=128, vocabulary=500)
TINY = replace(CASES[0], shape=SHAPE, prompt_tokens=4, longest=16, steps=2)


def test_the_batch_is_padded_like_trls() -> None:
    from benchmarks.learner.trl_side import padded_batch

    groups = make_batch(TINY, 0)
    batch = padded_batch(groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert batch["completion_ids"].shape == batch["old_per_token_logps"].shape == (16, 16)
    assert batch["completion_mask"].sum(dim=1).tolist() == [len(rollout.completion_ids) for rollout in rollouts]
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
    assert batch["advantages"].view(2, 8).sum(dim=1).abs().max() < 1e-5


@pytest.mark.slow
def test_both_sides_have_the_same_gradient(tmp_path: Path) -> None:
    row = compare(TINY, tmp_path, 0, Progress([Planned(name=TINY.name, seconds=1)]))
    assert row["gradient_difference"] < 1e-5
    assert min(row[name] for name in ("trl_s", "echo_s", "memory_ratio", "tokens_per_s")) > 0
