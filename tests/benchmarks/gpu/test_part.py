"""The parts of the GPU benchmark on a CPU, with a tiny model. Only calls into CUDA are not tested."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.shapes import ON_CPU, SHAPES

ROOT = Path(__file__).parents[3]


def measured(tmp_path: Path, *arguments: str, **environment: str) -> tuple[dict[str, object], str]:
    file = tmp_path / "figures.json"
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", "gpu", "--json", file, *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    document: dict[str, object] = json.loads(file.read_text())
    return document, run.stderr


@pytest.mark.slow
def test_every_part_returns_its_figures(tmp_path: Path) -> None:
    document, said = measured(tmp_path, **{ON_CPU: "1"})
    rows = {row["case"]: row for row in document["rows"]}  # type: ignore[attr-defined]
    assert rows.keys() >= {"learner, tiny", "sampler, tiny", "end to end, builtin:tiny"}
    assert not [row for row in rows.values() if "error" in row], said
    learner, sampler = rows["learner, tiny"], rows["sampler, tiny"]
    assert learner["learns"] and learner["out_of_memory"] == 0 and learner["tokens_per_s"] > 0
    assert learner["fitted_tokens"] == 16_384 and learner["matmul_share"] > 0
    assert sampler["sampler_tokens_per_s_at_16"] > 0 and sampler["swap_ms"] > 0
    assert sampler["share_of_graph_probe"] > 0
    assert sampler["agreement"] == 1.0, "on a CPU both are float32"
    assert sampler["left_out"] == [] and re.search(r"learner, tiny, \d+ of 60 s: step 3 of 3", said)
    whole = rows["end to end, builtin:tiny"]
    assert whole["steps"] > 1 and whole["tokens_per_s"] > 0 and 0 <= whole["learner_waited"] < 1
    assert (whole["quarantines"], whole["node"], whole["as_asked"]) == (0, "torch on cpu", True)
    if "beside TRL, tiny" in rows:
        assert rows["beside TRL, tiny"]["peak_gib"] > 0, "of the process that trained"


@pytest.mark.slow
def test_without_a_gpu_the_benchmark_reports_it_and_succeeds(tmp_path: Path) -> None:
    document, said = measured(tmp_path)
    assert "left out: learner, Qwen3-8B: there is no GPU" in said
    assert (document["rows"], document["headline"]) == ([], {"failed": 0})


def test_the_share_of_the_matrix_peak_counts_two_products_a_weight() -> None:
    shape = SHAPES["tiny"]
    layer = 32 * (4 * 8 + 2 * 8 + 2 * 8 + 4 * 8 + 3 * 64)
    assert shape.operations(10, 7) == 2 * 2 * (10 * 2 * layer + 7 * 2_000 * 32)
