"""The whole system on this machine: `echo-hub demo`, as a user runs it, and what it reached."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.measurement import Measurement
from echo_shared.step_figures import CLIP_FRACTION, COMPUTED_TOKENS, GRAD_NORM, MISMATCH_KL, TRAIN_S

DESCRIPTION: Final = "Held-out greedy accuracy before and after `echo-hub demo`, with two nodes on this machine"
TIMEOUT_S: Final = 900
METRICS: Final = tuple(f.key for f in (TRAIN_S, COMPUTED_TOKENS, MISMATCH_KL, CLIP_FRACTION, GRAD_NORM))


def measure(seed: int) -> Measurement:
    with tempfile.TemporaryDirectory(prefix="echo-demo-") as directory:
        run, report_file = Path(directory) / "run", Path(directory) / "report.json"
        arguments = ["demo", "--directory", str(run), "--seed", str(seed), "--json", str(report_file)]
        subprocess.run([sys.executable, "-m", "echo_hub.main", *arguments], check=True, timeout=TIMEOUT_S)
        report: dict[str, Any] = json.loads(report_file.read_text())
        rows = _steps(run)
    names = (
        "accuracy_before",
        "accuracy_after",
        "seconds",
        "policy_versions",
        "trained_by_node",
        "backend_by_node",
        "versions_by_transport",
    )
    conditions = {key: report[key] for key in ("leased", "trained", "dropped")}
    return Measurement(headline={name: report[name] for name in names}, rows=rows, conditions=conditions)


def _steps(run: Path) -> list[dict[str, Any]]:
    """One row a trained step, from the run's own store; `at_s` counts from the first step's end."""
    with sqlite3.connect(run / "echo.db") as database:
        steps = database.execute(
            "SELECT step, trained_at, mean_reward, staleness, metrics FROM steps ORDER BY step"
        ).fetchall()
    return [
        {
            "step": step,
            "at_s": trained_at - steps[0][1],
            "mean_reward": mean_reward,
            "staleness_max": max(json.loads(staleness)),
            **{name: json.loads(metrics).get(name) for name in METRICS},
        }
        for step, trained_at, mean_reward, staleness, metrics in steps
    ]
