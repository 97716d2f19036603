"""A hub and one node as real processes on this machine's GPU: how soon the hub trains, and how fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks import demo
from benchmarks.gpu.running import Budget
from benchmarks.harness.site import RunFailed, Settings, hub_process, merged, node_process, read_rows
from echo_hub.config.file import load_config
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run

PART: Final = "end to end"
REAL_MODEL: Final = "ECHO_BENCHMARK_MODEL"
"""Name of the environment variable with the model's directory, in Hugging Face layout. Without it, the built-in base is
used.
"""
BUILT_IN: Final = "builtin:tiny"
ENDING_S: Final = 25.0
"""Seconds reserved for ending the hub and the node."""
MOST_STEPS: Final = 100_000
STEPS_ON_CPU: Final = 8
"""Number of trained steps after which the part ends on a CPU, as in tests."""
LOOK_S: Final = 0.5
_SUMS: Final = 12
_END_WITH_PARENT: Final = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); os.execv(sys.argv[1], sys.argv[1:])"
)
_WITH_PARENT: Final = (sys.executable, "-c", _END_WITH_PARENT) if sys.platform == "linux" else ()
"""Start of the hub's command. On Linux, it makes the hub get SIGTERM when this process ends, even if it is killed. A
node does not need it, because it watches its standard input.
"""
_REAL_SETTINGS: Final[Settings] = {
    "sampling": {"max_tokens": 32, "temperature": 0.7},
    "task": {"name": "jsonl", "system_prompt": "Answer with the number only."},
    "training": {"group_size": 16, "groups_per_step": 16},
}
_NODE: Final = {"ECHO_NODE_MANNERS__GPU": "always"}
_STEPS: Final = (
    "SELECT trained_at, planned_at, num_tokens, metrics FROM steps WHERE trained_at IS NOT NULL ORDER BY step"
)


def model() -> str:
    path = os.environ.get(REAL_MODEL)
    return Path(path).name if path else BUILT_IN


def measure(seed: int, budget: Budget, *, device: str) -> dict[str, Any]:
    """Train until the budget is used up; on a CPU, for a few steps. Raises RunFailed if hub or node ends early."""
    with tempfile.TemporaryDirectory(prefix="echo-end-to-end-") as scratch:
        directory = Path(scratch)
        run, home = RunDirectory(directory / "run"), directory / "node"
        own: Settings = {"run": {"seed": seed}, "server": {"port": 0}, "training": {"steps": MOST_STEPS}}
        make_run(run, load_config(None, merged(_settings(directory), own)))
        budget.say("the hub starts")
        began_at = time.time()
        try:
            with hub_process(run.root, directory / "hub.log", within=_WITH_PARENT) as (hub, url):
                budget.say("the node starts")
                joined_at = time.time()
                with node_process(url, home, ["--backend", "torch"], env=_NODE) as node:
                    most = STEPS_ON_CPU if device == "cpu" else MOST_STEPS
                    _watch(run.root, budget, hub, node, most=most)
                    said = _status(home)
        except RunFailed as error:  # The logs will be deleted, so the error quotes them.
            words = (f"the {log.stem} said: {_last_words(log)}" for log in sorted(directory.glob("*.log")))
            raise RunFailed("; ".join([str(error), *words])) from error
        steps = _steps(run.root)
        # The node is honest, so each quarantine is an error.
        quarantines = read_rows(run.root, "SELECT count(*) FROM trust_log WHERE decision = 'quarantined'")[0][0]
        return {
            "first_step_s": steps[0]["trained_at"] - joined_at,
            "hub_start_s": joined_at - began_at,
            "steps": len(steps),
            **_figures(steps),
            "quarantines": quarantines,
            "node": f"{said['backend']} on {said['device']}",
            "as_asked": said["device"] == device,
            "cage": ", ".join(said["cage"].get("holds", ())) or "none",
            "problems": list(said["problems"].values()),
        }


def _settings(directory: Path) -> Settings:
    path = os.environ.get(REAL_MODEL)
    if path is None:
        return {"sampling": {"max_tokens": 6}}
    tasks = directory / "sums.jsonl"
    pairs = [(one, other) for one in range(1, _SUMS + 1) for other in range(1, _SUMS + 1)]
    lines = (json.dumps({"prompt": f"What is {one} + {other}?", "answer": str(one + other)}) for one, other in pairs)
    tasks.write_text("".join(f"{line}\n" for line in lines))
    return merged(_REAL_SETTINGS, {"model": {"base": path}, "task": {"options": {"path": str(tasks)}}})


def _watch(run: Path, budget: Budget, hub: subprocess.Popen[str], node: subprocess.Popen[str], *, most: int) -> None:
    """Wait for `most` steps, or until the budget is nearly used up. Print a line after 1, 10, 100, ... steps."""
    next_told, trained = 1, 0
    while budget.left_s > ENDING_S and trained < most:
        time.sleep(LOOK_S)
        for name, process in (("hub", hub), ("node", node)):
            if process.poll() is not None:
                raise RunFailed(f"the {name} ended with status {process.returncode}")
        trained = len(_steps(run))
        if trained >= next_told:
            budget.say(f"{next_told} steps are trained")
            next_told *= 10
    if not trained:
        raise RunFailed("no step was trained in the time")


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return " | ".join(lines[-3:])[-300:]


def _status(home: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "echo_node", "status", "--json", "--data-dir", str(home)]
    said: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return said


def _steps(run: Path) -> list[dict[str, Any]]:
    return [
        {"trained_at": trained, "planned_at": planned, "tokens": tokens, **json.loads(metrics)}
        for trained, planned, tokens, metrics in read_rows(run, _STEPS)
    ]


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
