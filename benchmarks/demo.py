"""The whole system on this machine: `echo-hub demo`, as a user runs it, and its accuracy.

`utilisation` is the share of time in which a step trains, from the first step's start to the last step's end, by the
learner's clock: the sum of train_s of all steps, over that sum and gap_s of all steps but the first. Time that a step
loses to nodes on the same processor counts as training.

`utilisation_when_ready` counts only time with a ready batch. It leaves out the part of each
gap before the step is planned, which is when its last reward arrives, by the hub's clock. The remainder to 1 is the
hand-off of the batch. In the rest of the time the learner waits for the nodes, which get the processor time that
learner and hub leave, or evaluates the base model itself before any node is there: `evaluating_s` between two steps.

Gaps are of two kinds: short ones if the next batch is ready in time, and waits for the nodes. `ready_in_time` is the
share of the first kind, `median_hand_off_s` the median of the gaps without waiting."""

from __future__ import annotations

import json
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.progress import Measurement, Planned, Progress
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
TIMEOUT_S: Final = 900
METRICS: Final = tuple(f.key for f in (TRAIN_S, GAP_S, EVAL_S, COMPUTED_TOKENS, MISMATCH_KL, CLIP_FRACTION, GRAD_NORM))


CASE: Final = "demo"


def plan() -> list[Planned]:
    return [Planned(name=CASE, seconds=50)]


def measure(seed: int, progress: Progress) -> Measurement:
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
    headline = {
        **{name: report[name] for name in names},
        "utilisation": utilisation(rows),
        "utilisation_when_ready": utilisation_when_ready(rows),
        "evaluating_s": sum(row[EVAL_S.key] for row in rows[1:]),
        "ready_in_time": statistics.fmean(waited == 0 for waited in map(waited_s, rows, rows[1:])),
        "median_hand_off_s": statistics.median(map(hand_off_s, rows, rows[1:])),
    }
    progress.done(CASE, {name: headline[name] for name in (*names[:4], "utilisation", "utilisation_when_ready")})
    return Measurement(headline=headline, rows=rows, conditions=conditions)


def utilisation(steps: Sequence[Mapping[str, float]]) -> float:
    """Share of training time. `steps` are all steps of one learner process, in order."""
    trained_s = sum(step[TRAIN_S.key] for step in steps)
    return trained_s / (trained_s + sum(step[GAP_S.key] for step in steps[1:]))


def utilisation_when_ready(steps: Sequence[Mapping[str, float]]) -> float:
    """Share of training time, without waits. `steps` are all steps of one learner process, in order."""
    trained_s = sum(step[TRAIN_S.key] for step in steps[1:])
    return trained_s / (trained_s + sum(map(hand_off_s, steps, steps[1:])))


def hand_off_s(before: Mapping[str, float], step: Mapping[str, float]) -> float:
    """Measure the hand-off of a batch: seconds from a free learner with a ready batch to the start of `step`.

    Evaluation time is subtracted unless the learner waited for the batch, because it may evaluate while it waits.
    """
    waited = waited_s(before, step)
    return step[GAP_S.key] - (waited or step[EVAL_S.key])


def waited_s(before: Mapping[str, float], step: Mapping[str, float]) -> float:
    """Seconds in which the learner was free after the step `before`, while `step` was not planned."""
    return max(0.0, step["planned_s"] - before["at_s"])


def _steps(run: Path) -> list[dict[str, Any]]:
    """Read one row for each trained step from the run's database. `planned_s` and `at_s` count from the first step's
    end."""
    with sqlite3.connect(run / "echo.db") as database:
        steps = database.execute(
            "SELECT step, planned_at, trained_at, mean_reward, staleness, metrics FROM steps ORDER BY step"
        ).fetchall()
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
