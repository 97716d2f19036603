from __future__ import annotations

import pytest

from benchmarks import gpu
from benchmarks.gpu import ON_CPU
from benchmarks.harness.progress import Planned, Progress


def test_the_headline_counts_failures() -> None:
    rows = [{"case": "a", "tokens_per_s": 5.0}, {"case": "b", "error": "x"}]
    assert gpu.headline(rows) == {"a: tokens_per_s": 5.0, "failed": 1}


@pytest.mark.parametrize("whole_s", [gpu.WHOLE_S, 200.0])
def test_parts_get_what_is_left_of_the_time(whole_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part takes all of its time. A part with too little of it is left out."""
    now = [0.0]

    def run_part(part: str, shape: str, seed: int, *, limit_s: float) -> dict[str, object]:
        now[0] += limit_s
        return {"peak_gib": 1.0, "case": "its own name"}

    monkeypatch.delenv(ON_CPU, raising=False)
    monkeypatch.setattr(gpu, "run_part", run_part)
    monkeypatch.setattr(gpu, "WHOLE_S", whole_s)
    names = [gpu.name_of(*case) for case in gpu.cases()]
    progress = Progress([Planned(name=name, seconds=1) for name in names], clock=lambda: now[0])
    measured = gpu.measure(0, progress)
    assert names[2] == "end to end, builtin:tiny" and names[-1] == "beside TRL, Qwen3-0.6B"
    done = [row["case"] for row in measured.rows]
    assert now[0] <= whole_s and done + [one.case for one in progress.left_out] == names


def test_a_failing_part_costs_only_its_own_row() -> None:
    def of(part: str, limit_s: float = 60.0) -> dict[str, object]:
        return gpu.run_part(part, "tiny", 0, limit_s=limit_s, module="tests.benchmarks.gpu.odd_part")

    assert of("fine") == {"a": 1}
    assert of("raises") == {"error": "ended with status 1; its error output says why"}
    assert of("hangs", 0.5) == {"error": "took more than 0 s"}
