"""The whole system on this machine: `echo-hub demo`, as a user runs it, and what it reached.

Its `utilisation` is the share of the wall-clock in which a step trains, from the first step's start to the last one's
end, by the learner's own clock: the sum of all steps' train_s, over that sum and the gap_s of all steps but the first,
which have none between them. What a step takes longer because nodes compute on the same processor counts as training.

`utilisation_when_ready` is the same share of the time in which the learner has a batch to train on: without what of a
gap lies before the step is planned, by the hub's clock, which is the moment that its last reward is there. What is
missing to 1 is the way of the batch to the learner. The rest of the time it waits for the nodes, which on this machine
have what learner and hub leave them of the processor, or evaluates the base model, which it does itself before any node
is there: `evaluating_s` of it between two steps.

The median of the gaps says little: they are of two kinds, hardly any where the next batch was there in time, and the
wait for the nodes where it was not. `ready_in_time` is the share of the first kind, `median_hand_off_s` the median of
what of each gap is not waiting.
"""

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

from benchmarks.harness.measurement import Measurement
from benchmarks.harness.progress import Planned, Progress
from echo_shared.step_figures import CLIP_FRACTION, COMPUTED_TOKENS, EVAL_S, GAP_S, GRAD_NORM, MISMATCH_KL, TRAIN_S

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
    """Of all steps of one learner process, in order."""
    trained_s = sum(step[TRAIN_S.key] for step in steps)
    return trained_s / (trained_s + sum(step[GAP_S.key] for step in steps[1:]))


def utilisation_when_ready(steps: Sequence[Mapping[str, float]]) -> float:
    """Of all steps of one learner process, in order, but the first."""
    trained_s = sum(step[TRAIN_S.key] for step in steps[1:])
    return trained_s / (trained_s + sum(map(hand_off_s, steps, steps[1:])))


def hand_off_s(before: Mapping[str, float], step: Mapping[str, float]) -> float:
    """Seconds from when the learner had `step`'s batch and was free, until it began.

    Where it waited for the batch, what it evaluated is not taken off: that may have been while it waited.
    """
    waited = waited_s(before, step)
    return step[GAP_S.key] - (waited or step[EVAL_S.key])


def waited_s(before: Mapping[str, float], step: Mapping[str, float]) -> float:
    """Seconds for which the learner was free after the step `before`, and `step` not planned yet."""
    return max(0.0, step["planned_s"] - before["at_s"])


def _steps(run: Path) -> list[dict[str, Any]]:
    """One row a trained step, from the run's own store; `planned_s` and `at_s` count from the first step's end."""
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
