from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu.end_to_end import REAL_MODEL
from benchmarks.gpu.shapes import ON_CPU
from benchmarks.harness.progress import Planned, Progress


def test_the_headline_counts_failures() -> None:
    rows = [{"case": "a", "tokens_per_s": 5.0}, {"case": "b", "error": "x"}]
    assert gpu.headline(rows) == {"a: tokens_per_s": 5.0, "failed": 1}
    assert gpu.plan()


@pytest.mark.parametrize(("whole_s", "left_out"), [(gpu.WHOLE_S, 0), (gpu.WHOLE_S - 30, 1)])
def test_all_parts_run_within_the_time(whole_s: float, left_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if every part uses up its time limit, the benchmark ends in time: it skips parts that no longer fit."""
    now = [0.0]
    asked: list[tuple[str, float]] = []

    def run_part(part: str, shape: str, seed: int, *, limit_s: float) -> dict[str, object]:
        asked.append((f"{part}, {shape}", limit_s))
        now[0] += limit_s
        return {"peak_gib": 1.0, "case": "its own name"}

    monkeypatch.delenv(ON_CPU, raising=False)
    monkeypatch.setattr(gpu, "run_part", run_part)
    monkeypatch.setattr(gpu, "WHOLE_S", whole_s)
    progress = Progress([Planned(name=name, seconds=1) for name, _, _ in gpu.cases()], clock=lambda: now[0])
    measured = gpu.measure(0, progress)
    names = [name for name, _, _ in gpu.cases()]
    assert names[2] == "end to end, builtin:tiny" and names[-1] == "beside TRL, Qwen3-0.6B"
    assert [name for name, _ in asked] == [row["case"] for row in measured.rows] == names[: len(names) - left_out]
    assert now[0] <= whole_s and [*progress.left_out] == names[len(names) - left_out :]


def test_the_end_to_end_part_is_named_after_a_real_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(REAL_MODEL, str(tmp_path / "SmolLM2"))
    assert ("end to end, SmolLM2", "end to end", "SmolLM2") in gpu.cases()
