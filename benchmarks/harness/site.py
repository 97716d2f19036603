"""A run under test: hub and node processes, and queries of the run's database."""

from __future__ import annotations

import socket
import sqlite3
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.harness.hostile.engine import ATTACK, FORGED, SHARE
from benchmarks.harness.processes import RunFailed, hub_process, node_process, processor_s
from echo_hub.config.file import load_config
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run

LOOK_S: Final = 0.05

Settings = Mapping[str, Mapping[str, Any]]
"""Sections of a config.toml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningNode:
    """A node's process. `forged` is a file listing the ids of forged rollouts."""

    name: str
    process: subprocess.Popen[str]
    forged: Path


@dataclass(slots=True, kw_only=True)
class Site:
    """A serving hub and its started nodes. All processes end with the block of `open_site`."""

    url: str
    run: RunDirectory
    scratch: Path
    hub: subprocess.Popen[str]
    processes: ExitStack
    _num_nodes: int = field(default=0)

    @property
    def token(self) -> str:
        """Return the operator's token."""
        return self.run.operator_token.read_text().strip()

    @property
    def log(self) -> Path:
        """Return the hub's standard error."""
        return self.scratch / "hub.log"

    def node(
        self,
        options: Sequence[str],
        *,
        attack: str = "",
        share: float = 1.0,
        within: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> RunningNode:
        """Start a node. With `attack`, its engine falsifies this share of its rollouts (`harness.hostile`)."""
        self._num_nodes += 1
        home = self.scratch / f"node{self._num_nodes}"
        forged = home.with_suffix(".forged")
        forged.touch()
        process = self.processes.enter_context(
            node_process(
                self.url,
                home,
                ["--swarm-host", "127.0.0.1", *options],
                module="benchmarks.harness.hostile.node" if attack else "echo_node.main",
                within=within,
                env={**(env or {}), ATTACK: attack, SHARE: str(share), FORGED: str(forged)},
            )
        )
        return RunningNode(name=home.name, process=process, forged=forged)

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Query the run's database."""
        with closing(sqlite3.connect(self.run.root / "echo.db", timeout=30.0)) as database:
            return database.execute(query, values).fetchall()

    def newest_step(self) -> int:
        """Return the newest trained step, or 0."""
        return int(self.rows("SELECT coalesce(max(step), 0) FROM steps WHERE trained_at IS NOT NULL")[0][0])

    def wait_for_step(self, step: int, *, within_s: float) -> None:
        """Wait until the step is trained. Raises RunFailed."""
        give_up_at = time.monotonic() + within_s
        while self.newest_step() < step:
            if self.hub.poll() is not None or time.monotonic() > give_up_at:
                raise RunFailed(f"step {step} is not trained: see {self.scratch}")
            time.sleep(LOOK_S)

    def processor_s(self, module: str = "") -> float:
        """Processor seconds of the hub's own process, or of its child process that runs `module`."""
        hub = psutil.Process(self.hub.pid)
        if not module:
            return processor_s([hub])
        return processor_s([child for child in hub.children(recursive=True) if module in child.cmdline()][:1])


def merged(settings: Settings, changes: Settings) -> dict[str, dict[str, Any]]:
    """Return `settings` with the values of `changes`, section by section."""
    names = settings.keys() | changes.keys()
    return {name: {**settings.get(name, {}), **changes.get(name, {})} for name in names}


@contextmanager
def open_site(scratch: Path, settings: Settings, *, verbose: bool = False) -> Iterator[Site]:
    """Make a run below `scratch`, and serve it until the block is left."""
    scratch.mkdir(exist_ok=True)
    run = RunDirectory(scratch / "run")
    make_run(run, load_config(None, settings))
    with serving(run, scratch, verbose=verbose) as site:
        yield site


@contextmanager
def serving(run: RunDirectory, scratch: Path, *, verbose: bool = False) -> Iterator[Site]:
    """Serve an existing run until the block is left."""
    with ExitStack() as processes:
        hub, url = processes.enter_context(hub_process(run.root, scratch / "hub.log", verbose=verbose))
        yield Site(url=url, run=run, scratch=scratch, hub=hub, processes=processes)


def free_port() -> int:
    """Return a port of loopback that no process uses at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
