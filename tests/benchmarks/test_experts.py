"""The benchmark of mixtures of experts: its cases are measured, and its main figures are computed from handwritten
rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import experts
from benchmarks.experts import (
    DENSE,
    FORMS,
    GPT_OSS,
    QWEN,
    equal,
    headline,
    learning_case,
    mismatch_case,
    over_seeds,
    pieces,
    plan,
    read_text,
)


def test_every_case_has_a_name_of_its_own() -> None:
    names = [case.name for case in plan()]
    assert len(set(names)) == len(names) == 2 * len(FORMS) + 3
    assert {mismatch_case(GPT_OSS, "bf16"), learning_case(QWEN, replays=False)} < set(names)
    assert learning_case(DENSE, replays=True) == "learning, dense"


def row(case: str, **figures: float) -> dict[str, Any]:
    return {"case": case, **figures}


def test_main_figures_by_hand() -> None:
    rows = [
        row(mismatch_case(DENSE, "bf16"), mismatch_kl_own_routes=1e-5),
        row(mismatch_case(QWEN, "bf16"), mismatch_kl_own_routes=8e-5, mismatch_kl_replayed=2e-5),
        row(mismatch_case(GPT_OSS, "bf16"), mismatch_kl_own_routes=4e-5, mismatch_kl_replayed=3e-5),
        row(learning_case(DENSE, replays=True), gain=0.2, gain_error=0.03),
        row(learning_case(QWEN, replays=True), gain=0.3, gain_error=0.04),
    ]
    mismatch = {"mismatch_over_dense_own_routes": 8.0, "mismatch_over_dense_replayed": 3.0}
    learned = {"moe_gain_over_dense": 1.5, "moe_gain_minus_dense": 0.1, "moe_gain_minus_dense_error": 0.05}
    assert headline(rows) == pytest.approx({**mismatch, **learned})
    assert headline(rows[1:3]) == {}, "a part of the cases"


def test_pieces_are_parts_of_the_text() -> None:
    text = read_text()
    found = pieces(text, np.random.default_rng(0), 3, 20)
    assert found.shape == (3, 20)
    assert all(part.astype(np.uint8).tobytes() in text.tobytes() for part in found)


def test_figures_over_seeds_by_hand() -> None:
    found = over_seeds([{"gain": 0.1, "reward_last": 0.4}, {"gain": 0.3, "reward_last": 0.6}])
    assert found.pop("gains") == [0.1, 0.3]
    assert found == pytest.approx({"seeds": 2, "gain": 0.2, "reward_last": 0.5, "gain_error": 0.1})


def test_a_small_base_learns_until_the_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "LEVEL", 4.5)
    for form in (DENSE, QWEN):
        base = equal(form, tmp_path / form.name, read_text(), 0)
        assert (base / "model.safetensors").exists()
    monkeypatch.setattr(experts, "LEVEL", 0.0)
    monkeypatch.setattr(experts, "LEVEL_STEPS", experts.LEVEL_EVERY)
    with pytest.raises(RuntimeError, match="does not reach"):
        equal(DENSE, tmp_path / "never", read_text(), 0)
