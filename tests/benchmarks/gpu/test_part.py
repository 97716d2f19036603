"""The parts' code on a CPU, with a shape of milliseconds; only CUDA's own calls are left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import ON_CPU

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_every_part_gives_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", "gpu", "--json", file],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", ON_CPU: "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    rows = {row["case"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows.keys() >= {"learner, tiny", "sampler, tiny", "end to end, builtin:tiny"}
    assert not [row for row in rows.values() if "error" in row], run.stderr
    learner, sampler = rows["learner, tiny"], rows["sampler, tiny"]
    assert learner["learns"] and learner["out_of_memory"] == 0 and learner["tokens_per_s"] > 0
    assert learner["fitted_tokens"] == 16_384 and learner["matmul_share"] > 0
    assert sampler["tokens_per_s_at_16"] > 0 and sampler["swap_ms"] > 0
    assert sampler["agreement"] == 1.0, "on a CPU both are float32"
    whole = rows["end to end, builtin:tiny"]
    assert whole["steps"] > 1 and whole["tokens_per_s"] > 0 and 0 <= whole["learner_waited"] < 1
    assert (whole["quarantines"], whole["node"], whole["as_asked"]) == (0, "torch on cpu", True)
    if "beside TRL, tiny" in rows:
        assert rows["beside TRL, tiny"]["peak_gib"] > 0, "peak memory of Echo's process"
