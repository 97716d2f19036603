"""The hub whose pages are looked at: a real one that trains, with real nodes at work, on books of a long run."""

from __future__ import annotations

import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.harness.books import Amount, fill
from benchmarks.harness.processes import RunFailed, hub_process, node_process
from echo_hub.config.file import load_config
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.store.database import connect

NODES_AT_WORK: Final = 2
STEPS_BEFORE: Final = 8
"""Trained before the books are filled: what a long run has more than one of."""
PATIENCE_S: Final = 300.0
LOOK_S: Final = 0.1
ELSEWHERE: Final = ("nice", "-n", "19")
"""Nodes have machines of their own, so they get what hub and learner leave of this one."""
SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "run": {"name": "pages"},
    "training": {"steps": 100_000},
    "learner": {"threads": 1, "checkpoint_every": 5},
    "sampling": {"max_tokens": 6},
    "evaluation": {"problems": 16},
    "server": {"port": 0, "shared_memory": False},
}


@dataclass(slots=True, kw_only=True)
class Site:
    """A hub at work."""

    url: str
    run: RunDirectory
    scratch: Path
    hub: subprocess.Popen[str]

    @property
    def token(self) -> str:
        """The operator's."""
        return self.run.operator_token.read_text().strip()

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """What the store says."""
        with closing(sqlite3.connect(self.run.root / "echo.db", timeout=30.0)) as books:
            return books.execute(query, values).fetchall()

    def processor_s(self) -> float:
        """What the hub's own process has computed; its scorers, learner and verifier have others."""
        times = psutil.Process(self.hub.pid).cpu_times()
        return float(times.user + times.system)

    def newest_step(self) -> int:
        return int(self.rows("SELECT coalesce(max(step), 0) FROM steps WHERE trained_at IS NOT NULL")[0][0])

    def wait_for_step(self, step: int) -> None:
        """Raises RunFailed."""
        until = time.monotonic() + PATIENCE_S
        while self.newest_step() < step:
            if self.hub.poll() is not None or time.monotonic() > until:
                raise RunFailed(f"the run does not get on: see {self.scratch}")
            time.sleep(LOOK_S)


@contextmanager
def open_site(
    scratch: Path, *, nodes: int, rollouts: int, seed: int, while_empty: Callable[[Site], None]
) -> Iterator[Site]:
    """A hub on books with so many nodes and rollouts, two nodes of them at work. `while_empty` is called before there
    is any node."""
    run = RunDirectory(scratch / "run")
    make_run(run, load_config(None, {**SETTINGS, "run": {**SETTINGS["run"], "seed": seed}}))
    with _serving(run, scratch) as site:
        while_empty(site)
        with _at_work(site):
            site.wait_for_step(STEPS_BEFORE)
    engine = connect(run.database_url)
    fill(engine, Amount(nodes=nodes, rollouts=rollouts), seed=seed, now=time.time())
    engine.dispose()
    with _serving(run, scratch) as site, _at_work(site):
        site.wait_for_step(site.newest_step() + 1)
        yield site


@contextmanager
def _serving(run: RunDirectory, scratch: Path) -> Iterator[Site]:
    with hub_process(run.root, scratch / "hub.log") as (hub, url):
        yield Site(url=url, run=run, scratch=scratch, hub=hub)


@contextmanager
def _at_work(site: Site) -> Iterator[None]:
    with ExitStack() as processes:
        for number in range(NODES_AT_WORK):
            home = site.scratch / f"node{number}"
            options = ["--swarm-host", "127.0.0.1", "--backend", "torch"]
            processes.enter_context(node_process(site.url, home, options, within=ELSEWHERE))
        yield
