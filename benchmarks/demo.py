"""The whole system on this machine: `echo-hub demo`, as a user runs it, and its accuracy.

`utilisation` is the share of time spent on training, from the start of the first step to the end of the last one, by
the learner's clock: the sum of all train_s, over that sum plus the gap_s of all steps but the first. Time that a step
loses to nodes on the same processor counts as training.

`utilisation_when_ready` counts only time with a ready batch: time before the step's plan does not count. By the hub's
clock, a step is planned when its last reward arrives. The rest up to 1 is the hand-off of batches. During the uncounted
time, the learner waits for nodes, which share its processors, or evaluates the base model before the first node joins
(`evaluating_s`).

`ready_in_time` is the share of gaps in which the next batch was ready when the learner was free. `median_hand_off_s` is
the median gap, minus the wait for the batch.

`demo_over_beaf3fcc` is the demo's time over that of the commit beaf3fcc, which runs before and after it on the same
machine and libraries. `demo_processor_over_beaf3fcc` compares the processor time of all processes in the same way.
"""

from __future__ import annotations

import compileall
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.progress import Measurement, Planned, Progress
from benchmarks.harness.site import read_rows
from echo_shared.records.step_figures import (
    CLIP_FRACTION,
    COMPUTED_TOKENS,
    EVAL_S,
    GAP_S,
    GRAD_NORM,
    MISMATCH_KL,
    TRAIN_S,
)

DESCRIPTION: Final = "Held-out greedy accuracy before and after `echo-hub demo`, with two nodes on this machine"
TIMEOUT_S: Final = 3_600
METRICS: Final = tuple(f.key for f in (TRAIN_S, GAP_S, EVAL_S, COMPUTED_TOKENS, MISMATCH_KL, CLIP_FRACTION, GRAD_NORM))


CASE: Final = "demo"
OLDER: Final = "beaf3fcc"
OVER_OLDER: Final = f"over {OLDER}"
_REPOSITORY: Final = Path(__file__).parents[1]
_PACKAGES: Final = ("hub", "edge_client", "shared")
"""Directories of the repository that hold Echo's packages; the commit `OLDER` has them too."""


def plan() -> list[Planned]:
    known = ["git", "-C", str(_REPOSITORY), "cat-file", "-e", f"{OLDER}^{{commit}}"]
    is_here = shutil.which("git") is not None and subprocess.run(known, stderr=subprocess.DEVNULL).returncode == 0
    lacks = "" if is_here else f"commit {OLDER} is not here: it needs git and a clone with history"
    return [Planned(name=CASE, seconds=50), Planned(name=OVER_OLDER, seconds=100, lacks=lacks)]


def measure(seed: int, progress: Progress) -> Measurement:
    with tempfile.TemporaryDirectory(prefix="echo-demo-") as name:
        directory, older = Path(name), []
        if progress.wants(OVER_OLDER):
            older.append(run_demo(directory / "before", seed, source=_older(directory)))
        report = run_demo(directory, seed)
        rows = _steps(directory / "run")
        if progress.wants(OVER_OLDER):
            older.append(run_demo(directory / "after", seed, source=directory / OLDER))
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
    headline = {
        **{name: report[name] for name in names},
        "utilisation": utilisation(rows),
        "utilisation_when_ready": utilisation_when_ready(rows),
        "evaluating_s": sum(row[EVAL_S.key] for row in rows[1:]),
        "ready_in_time": statistics.fmean(waited == 0 for waited in map(waited_s, rows, rows[1:])),
        "median_hand_off_s": statistics.median(map(hand_off_s, rows, rows[1:])),
    }
    if progress.wants(CASE):
        progress.done(CASE, {name: headline[name] for name in (*names[:4], "utilisation", "utilisation_when_ready")})
    if older:
        over = {
            f"{key}_over_{OLDER}": report[figure] / statistics.fmean(each[figure] for each in older)
            for key, figure in (("demo", "seconds"), ("demo_processor", "processor_s"))
        }
        headline |= over
        progress.done(OVER_OLDER, over)
    return Measurement(headline=headline, rows=rows, conditions=conditions)


def _older(directory: Path) -> Path:
    """Unpack and compile the packages of the commit `OLDER` in `directory`. Return the directory that holds them."""
    archive = ["git", "-C", str(_REPOSITORY), "archive", f"--prefix={OLDER}/", OLDER, *_PACKAGES]
    packed = subprocess.run(archive, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(directory, filter="data")
    compileall.compile_dir(directory / OLDER, quiet=1)
    return directory / OLDER


def run_demo(directory: Path, seed: int, *options: str, source: Path | None = None) -> dict[str, Any]:
    """Run the demo in `directory`/run. Its packages come from `source`; None means those of this installation. Return
    the demo's report, plus the processor time of all its processes as `processor_s`. Raises CalledProcessError.
    """
    directory.mkdir(exist_ok=True)
    run, report_file = directory / "run", directory / "report.json"
    arguments = ["demo", "--directory", str(run), "--seed", str(seed), "--json", str(report_file), *options]
    path = [] if source is None else [str(source / package) for package in _PACKAGES]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)} if path else None
    before = os.times()
    command = [sys.executable, "-m", "echo_hub.main", *arguments]
    subprocess.run(command, check=True, timeout=TIMEOUT_S, env=environment)
    processor_s = sum(os.times()[2:4]) - sum(before[2:4])
    return {**json.loads(report_file.read_text()), "processor_s": processor_s}


def utilisation(steps: Sequence[Mapping[str, float]]) -> float:
    """Return the share of time spent on training. `steps` are all steps of one learner process, in order."""
    trained_s = sum(step[TRAIN_S.key] for step in steps)
    return trained_s / (trained_s + sum(step[GAP_S.key] for step in steps[1:]))


def utilisation_when_ready(steps: Sequence[Mapping[str, float]]) -> float:
    """Return the share of time spent on training, leaving out time in which the learner waited for a batch. `steps` are
    all steps of one learner process, in order.
    """
    trained_s = sum(step[TRAIN_S.key] for step in steps[1:])
    return trained_s / (trained_s + sum(map(hand_off_s, steps, steps[1:])))


def hand_off_s(before: Mapping[str, float], step: Mapping[str, float]) -> float:
    """Return the seconds in which the batch was ready and the learner free, before it started `step`.

    Evaluation time is subtracted, unless the learner waited for the batch: then it may have evaluated while it waited.
    """
    waited = waited_s(before, step)
    return step[GAP_S.key] - (waited or step[EVAL_S.key])


def waited_s(before: Mapping[str, float], step: Mapping[str, float]) -> float:
    """Return the seconds in which the learner was free after the step `before` and `step` was not planned yet."""
    return max(0.0, step["planned_s"] - before["at_s"])


def _steps(run: Path) -> list[dict[str, Any]]:
    """Return one row per trained step from the run's database. `planned_s` and `at_s` count from the end of the first
    step.
    """
    query = "SELECT step, planned_at, trained_at, mean_reward, staleness, metrics FROM steps ORDER BY step"
    steps = read_rows(run, query)
    return [
        {
            "step": step,
            "planned_s": planned_at - steps[0][2],
            "at_s": trained_at - steps[0][2],
            "mean_reward": mean_reward,
            "staleness_max": max(json.loads(staleness)),
            **{name: json.loads(metrics).get(name) for name in METRICS},
        }
        for step, planned_at, trained_at, mean_reward, staleness, metrics in steps
    ]
