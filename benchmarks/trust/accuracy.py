"""What hostile rollouts cost the model: whole runs of the built-in model, with and without them.

A run has two nodes of the same engine. One of them falsifies such a share of its rollouts that they are `hostile_share`
of all, as long as the hub takes them. `learned` is the held-out accuracy of the last version.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.backends.cases import lacks
from benchmarks.hostile.engine import ATTACK, FORGED, SHARE
from benchmarks.processes import RunFailed, hub_process, node_process
from benchmarks.progress import Planned, Progress
from echo_hub.config.file import load_config
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run

STEPS: Final = 60
ENDS_AFTER_S: Final = 400.0
LOOK_S: Final = 0.5
SECONDS: Final = 75.0
"""About, of one run."""
ATTACKS: Final = ("forged digits, possible claims", "claims of -10", "hand-written answers")
SHARES: Final = (0.01, 0.2)

SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "training": {"steps": STEPS},
    "learner": {"threads": 1},
    "sampling": {"max_tokens": 6},
    "evaluation": {"problems": 4096},
    "server": {"port": 0, "shared_memory": False},
}
UNDEFENDED: Final[Mapping[str, Mapping[str, Any]]] = {"objective": {"name": "grpo"}, "trust": {"verifier": "off"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run."""

    attack: str = "honest"
    hostile_share: float = 0.0
    defended: bool = True

    @property
    def name(self) -> str:
        what = f"{self.attack}, {self.hostile_share:.0%}" if self.hostile_share else "no attack"
        return f"accuracy, {what}{'' if self.defended else ', undefended'}"


CASES: Final = (
    Case(),
    *(Case(attack=attack, hostile_share=share) for attack in ATTACKS for share in SHARES),
    Case(attack=ATTACKS[0], hostile_share=SHARES[0], defended=False),
)


def plan() -> list[Planned]:
    missing = lacks("llama_cpp", "f32")
    return [Planned(name=case.name, seconds=SECONDS, lacks=missing) for case in CASES]


def measure(scratch: Path, progress: Progress, *, seed: int) -> list[dict[str, Any]]:
    """One row a run."""
    rows = []
    for number, case in enumerate(CASES):
        if progress.wants(case.name):
            row = {"case": case.name, **_run(case, scratch / f"accuracy{number}", seed)}
            rows.append(row)
            progress.done(case.name, {"learned": row["learned"], "hostile_trained": row["hostile_trained"]})
    return rows


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What the worst attack of each share cost, beside the honest run."""
    learned = {row["case"]: row["learned"] for row in rows}
    honest = learned.get(CASES[0].name)
    found = {}
    for share in SHARES:
        of_share = [
            learned[case.name]
            for case in CASES
            if case.hostile_share == share and case.defended and case.name in learned
        ]
        if honest is not None and of_share:
            found[f"accuracy_lost_at_{share * 100:.0f}pct"] = honest - min(of_share)
    return found


def _run(case: Case, directory: Path, seed: int) -> dict[str, Any]:
    directory.mkdir()
    run = RunDirectory(directory / "run")
    overrides = UNDEFENDED if not case.defended else {}
    make_run(run, load_config(None, {**SETTINGS, **overrides, "run": {"name": "trust", "seed": seed}}))
    began_at = time.monotonic()
    with ExitStack() as processes:
        hub, url = processes.enter_context(hub_process(run.root, directory / "hub.log"))
        options = ["--backend", "llama_cpp", "--precision", "f32", "--swarm-host", "127.0.0.1"]
        honest = processes.enter_context(node_process(url, directory / "honest", options))
        falsified = {ATTACK: case.attack, SHARE: str(min(1.0, 2 * case.hostile_share)), FORGED: os.devnull}
        hostile = processes.enter_context(
            node_process(url, directory / "hostile", options, module="benchmarks.hostile.node", env=falsified)
        )
        learned = _last_accuracy(run, [hub, honest, hostile])
    return {
        "learned": learned,
        "seconds": time.monotonic() - began_at,
        "hostile_trained": _share_trained(run, "hostile"),
    }


def _last_accuracy(run: RunDirectory, processes: Sequence[subprocess.Popen[str]]) -> float:
    """Waits for it. Raises RunFailed."""
    until = time.monotonic() + ENDS_AFTER_S
    with closing(sqlite3.connect(run.root / "echo.db")) as books:
        while True:
            found = books.execute("SELECT accuracy FROM evaluations WHERE policy_version = ?", (STEPS,)).fetchone()
            if found is not None:
                return float(found[0])
            if processes[0].poll() is not None or time.monotonic() > until:
                raise RunFailed(f"the run has not come to its end: see {run.root.parent}")
            time.sleep(LOOK_S)


def _share_trained(run: RunDirectory, name: str) -> float:
    """Of all rollouts that were trained, those of this node, whether falsified or not."""
    query = (
        "SELECT sum(rollouts) FILTER (WHERE nodes.name = ?) * 1.0 / sum(rollouts)"
        " FROM tallies JOIN nodes USING (node_id) WHERE outcome = 'trained'"
    )
    with closing(sqlite3.connect(run.root / "echo.db")) as books:
        return float(books.execute(query, (name,)).fetchone()[0] or 0.0)
