"""Time until the built-in model solves nine of ten held-out problems, with the commands that a user would start.

One side is `echo-hub demo`: the hub and two nodes as processes, start included. The other side is TRL's GRPOTrainer in
a separate process, with a thread for each core, and with the same model, adapter, batch, objective, problems and
learning rate. Both are evaluated every five steps on the same problems. The time runs from the start of the first
process to the evaluation that reaches the accuracy.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.progress import Measurement, Planned, Progress
from benchmarks.harness.site import RunFailed, ended, read_rows

NAME: Final = "TRL alone: time to 90 %"
ACCURACY: Final = 0.9
MOST_STEPS: Final = 120
EVALUATE_EVERY: Final = 5
WITHIN_S: Final = 900.0
LOOK_EVERY_S: Final = 0.2


def planned() -> Planned:
    return Planned(name=NAME, seconds=260)


def measure(seed: int, progress: Progress) -> Measurement:
    """Return both times and their ratio; None if Echo never reached the accuracy. If TRL never reached it, TRL's whole
    time counts, so the ratio is an upper bound.
    """
    with tempfile.TemporaryDirectory(prefix="echo-papers-") as directory:
        echo = demo(Path(directory), seed)
        trl = alone(Path(directory), seed)
    ratio = None if echo["seconds"] is None else echo["seconds"] / (trl["seconds"] or trl["whole_s"])
    headline = {"time_to_90_over_trl": ratio}
    progress.done(NAME, headline)
    rows = [{"table": NAME, **side, "source": "no paper: what else a user would take"} for side in (echo, trl)]
    return Measurement(headline=headline, rows=rows)


def demo(directory: Path, seed: int) -> dict[str, Any]:
    """Run `echo-hub demo` until a version reaches the accuracy. Raises RunFailed."""
    run = directory / "demo"
    arguments = ["demo", "--directory", str(run), "--seed", str(seed), "--steps", str(MOST_STEPS)]
    environment = {**os.environ, "ECHO_HUB_EVALUATION__EVERY": str(EVALUATE_EVERY)}
    began = time.monotonic()
    with (directory / "demo.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "echo_hub.main", *arguments], stdout=log, stderr=log, env=environment, text=True
        )
    seconds: float | None = None
    with ended(process):
        while seconds is None and time.monotonic() - began < WITHIN_S and process.poll() is None:
            time.sleep(LOOK_EVERY_S)
            if any(accuracy >= ACCURACY for _, accuracy in evaluations(run)):
                seconds = time.monotonic() - began
        whole_s = time.monotonic() - began
        if process.poll() not in (None, 0):
            raise RunFailed(f"the demo has failed: {(directory / 'demo.log').read_text(errors='replace')[-2_000:]}")
    points = evaluations(run)
    return {
        "case": "echo-hub demo: a hub, two nodes",
        "seconds": seconds,
        "whole_s": whole_s,
        "steps": points[-1][0] if points else 0,
        "accuracy": points[-1][1] if points else None,
    }


def evaluations(run: Path) -> list[tuple[int, float]]:
    """Return the versions and their greedy accuracies so far, in order; empty before there is a database."""
    try:
        return read_rows(
            run, "SELECT policy_version, accuracy FROM evaluations WHERE kind = 'greedy' ORDER BY policy_version"
        )
    except sqlite3.OperationalError:  # The database or its tables do not exist yet.
        return []


def alone(directory: Path, seed: int) -> dict[str, Any]:
    report = directory / "trl.json"
    began = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.papers.trl_run", str(seed), str(report)]
    subprocess.run(command, check=True, timeout=WITHIN_S)
    whole_s = time.monotonic() - began
    document = json.loads(report.read_text())
    reached = [at_s for at_s, accuracy in document["points"] if accuracy >= ACCURACY]
    return {
        "case": "TRL's GRPOTrainer",
        "seconds": reached[0] - began if reached else None,
        "whole_s": whole_s,
        "steps": document["steps"],
        "accuracy": document["points"][-1][1],
    }
