"""A hub and one node as real processes on this machine's GPU: how soon the hub trains, and how fast."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks import demo
from benchmarks.gpu.budget import Budget
from benchmarks.harness.site import RunFailed, hub_process, node_process

PART: Final = "end to end"
REAL_MODEL: Final = "ECHO_BENCHMARK_MODEL"
"""Environment variable: a directory in Hugging Face layout. Without it, the base is the built-in one."""
BUILT_IN: Final = "builtin:tiny"
ENDING_S: Final = 25.0
"""Seconds reserved for ending the hub and the node."""
MOST_STEPS: Final = 100_000
LOOK_S: Final = 0.5
_SUMS: Final = 12
_END_WITH_PARENT: Final = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); os.execv(sys.argv[1], sys.argv[1:])"
)
_WITH_PARENT: Final = (sys.executable, "-c", _END_WITH_PARENT) if sys.platform == "linux" else ()
"""On Linux, the hub gets SIGTERM when this process ends, even by a kill. A node watches its standard input instead."""
_SETTINGS: Final = {
    BUILT_IN: {"ECHO_HUB_SAMPLING__MAX_TOKENS": "6"},
    REAL_MODEL: {
        "ECHO_HUB_SAMPLING__MAX_TOKENS": "32",
        "ECHO_HUB_SAMPLING__TEMPERATURE": "0.7",
        "ECHO_HUB_TASK__NAME": "jsonl",
        "ECHO_HUB_TASK__SYSTEM_PROMPT": "Answer with the number only.",
        "ECHO_HUB_TRAINING__GROUP_SIZE": "16",
        "ECHO_HUB_TRAINING__GROUPS_PER_STEP": "16",
    },
}
_NODE: Final = {"ECHO_NODE_MANNERS__GPU": "always"}
_STEPS: Final = (
    "SELECT trained_at, planned_at, num_tokens, metrics FROM steps WHERE trained_at IS NOT NULL ORDER BY step"
)


def model() -> str:
    path = os.environ.get(REAL_MODEL)
    return Path(path).name if path else BUILT_IN


def measure(seed: int, budget: Budget, *, device: str) -> dict[str, Any]:
    """Train until the budget is used up. Raises RunFailed if the hub or the node ends early."""
    with tempfile.TemporaryDirectory(prefix="echo-end-to-end-") as scratch:
        directory = Path(scratch)
        run, home, environment = directory / "run", directory / "node", _environment(directory)
        make = [sys.executable, "-m", "echo_hub", "init", str(run), "--port", "0", "--steps", str(MOST_STEPS)]
        subprocess.run([*make, "--seed", str(seed)], env={**os.environ, **environment}, check=True, stdout=sys.stderr)
        budget.say("the hub starts")
        began_at = time.time()
        try:
            with hub_process(run, directory / "hub.log", within=_WITH_PARENT, env=environment) as (hub, url):
                budget.say("the node starts")
                joined_at = time.time()
                with node_process(url, home, ["--backend", "torch"], env=_NODE) as node:
                    _watch(run, budget, hub, node)
                    said = _status(home)
        except RunFailed as error:  # The directory with the logs is deleted, so the error includes them.
            words = (f"the {log.stem} said: {_last_words(log)}" for log in sorted(directory.glob("*.log")))
            raise RunFailed("; ".join([str(error), *words])) from error
        steps = _steps(run)
        return {
            "first_step_s": steps[0]["trained_at"] - joined_at,
            "hub_start_s": joined_at - began_at,
            "steps": len(steps),
            **_figures(steps),
            "quarantines": _quarantines(run),
            "node": f"{said['backend']} on {said['device']}",
            "as_asked": said["device"] == device,
            "cage": ", ".join(said["cage"].get("holds", ())) or "none",
            "problems": list(said["problems"].values()),
        }


def _environment(directory: Path) -> Mapping[str, str]:
    path = os.environ.get(REAL_MODEL)
    if path is None:
        return _SETTINGS[BUILT_IN]
    tasks = directory / "sums.jsonl"
    pairs = [(one, other) for one in range(1, _SUMS + 1) for other in range(1, _SUMS + 1)]
    lines = (json.dumps({"prompt": f"What is {one} + {other}?", "answer": str(one + other)}) for one, other in pairs)
    tasks.write_text("".join(f"{line}\n" for line in lines))
    where = {"ECHO_HUB_MODEL__BASE": path, "ECHO_HUB_TASK__OPTIONS": json.dumps({"path": str(tasks)})}
    return {**_SETTINGS[REAL_MODEL], **where}


def _watch(run: Path, budget: Budget, hub: subprocess.Popen[str], node: subprocess.Popen[str]) -> None:
    """Wait until the budget is nearly used up. Print a line after 1, 10, 100, ... trained steps."""
    next_told = 1
    while budget.left_s > ENDING_S:
        time.sleep(LOOK_S)
        for name, process in (("hub", hub), ("node", node)):
            if process.poll() is not None:
                raise RunFailed(f"the {name} ended with status {process.returncode}")
        if len(_steps(run)) >= next_told:
            budget.say(f"{next_told} steps are trained")
            next_told *= 10
    if not _steps(run):
        raise RunFailed("no step was trained in the time")


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return " | ".join(lines[-3:])[-300:]


def _status(home: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "echo_node", "status", "--json", "--data-dir", str(home)]
    said: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return said


def _steps(run: Path) -> list[dict[str, Any]]:
    with contextlib.closing(sqlite3.connect(f"file:{run / 'echo.db'}?mode=ro", uri=True, timeout=5.0)) as database:
        rows = database.execute(_STEPS).fetchall()
    return [
        {"trained_at": trained, "planned_at": planned, "tokens": tokens, **json.loads(metrics)}
        for trained, planned, tokens, metrics in rows
    ]


def _quarantines(run: Path) -> int:
    """Count quarantines. The node is honest, so each one is an error."""
    with contextlib.closing(sqlite3.connect(f"file:{run / 'echo.db'}?mode=ro", uri=True, timeout=5.0)) as database:
        (count,) = database.execute("SELECT count(*) FROM trust_log WHERE decision = 'quarantined'").fetchone()
    return int(count)


def _figures(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the rates over all steps except the first, which includes the node's start."""
    if len(steps) < 2:
        return {"tokens_per_s": None, "step_s": None, "learner_waited": None}
    span_s = steps[-1]["trained_at"] - steps[0]["trained_at"]
    return {
        "tokens_per_s": sum(step["tokens"] for step in steps[1:]) / span_s,
        "step_s": span_s / (len(steps) - 1),
        "learner_waited": 1 - demo.utilisation(steps),
    }
