"""The hub that is attacked, in a process of its own, and how it is meanwhile: its answers' delay and its memory."""

from __future__ import annotations

import socket
import sqlite3
import ssl
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.hostile.engine import ATTACK, FORGED, SHARE
from benchmarks.processes import RunFailed, hub_process, node_process
from benchmarks.trust.bystander import Bystander, opened
from echo_hub.config.file import load_config
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_shared.messages.fields import printable

LOOK_S: Final = 0.05
ELSEWHERE: Final = ("nice", "-n", "10")
"""Nodes have machines of their own, so hub, learner and verifier go before them on this one; but something is left for
them even where all else is busy, too, for a hostile node that gets no turn shows nothing."""
SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "run": {"name": "trust"},
    "training": {"steps": 100_000},
    "learner": {"threads": 1, "checkpoint_every": 50},
    "sampling": {"max_tokens": 6},
    "evaluation": {"problems": 1},
    "leases": {"deadline_s": 10.0},
    "server": {"port": 0, "shared_memory": False},
}


@dataclass(slots=True, kw_only=True)
class Health:
    """The worst of a time: seconds that `/healthz` took, growth of the hub's own memory and of its logs in bytes."""

    stall_s: float = 0.0
    growth_bytes: int = 0
    log_bytes: int = 0
    is_log_plain: bool = True
    """Nothing in what was logged steers a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningNode:
    """`forged`: a file with the ids of the rollouts that it has forged."""

    name: str
    process: subprocess.Popen[str]
    forged: Path


@dataclass(slots=True, kw_only=True)
class Site:
    """A hub at work. `books` may be read at any time."""

    url: str
    run: RunDirectory
    scratch: Path
    processes: ExitStack
    hub: subprocess.Popen[str]
    bystander: Bystander
    trust: ssl.SSLContext | None = None
    """Whose certificates are good, where the hub speaks TLS itself."""
    _num_nodes: int = field(default=0)

    def node(self, options: Sequence[str], *, attack: str = "", share: float = 1.0) -> RunningNode:
        """Starts a node, hostile if it is to attack."""
        self._num_nodes += 1
        home = self.scratch / f"node{self._num_nodes}"
        module = "benchmarks.hostile.node" if attack else "echo_node.main"
        forged = home.with_suffix(".forged")
        forged.touch()
        falsified = {ATTACK: attack, SHARE: str(share), FORGED: str(forged)} if attack else {}
        arguments = ["--swarm-host", "127.0.0.1", *options]
        process = self.processes.enter_context(
            node_process(self.url, home, arguments, module=module, within=ELSEWHERE, env=falsified)
        )
        return RunningNode(name=home.name, process=process, forged=forged)

    @property
    def log(self) -> Path:
        """What the hub tells its operator, details included."""
        return self.scratch / "hub.log"

    def logs(self) -> dict[Path, int]:
        """All that hub, scorers, learner and verifier log to, with its size."""
        return {path: path.stat().st_size for path in (self.log, *(self.run.root / "logs").glob("*"))}

    def start_again(self) -> None:
        """The hub is killed, and comes back at the same port, which has to be set."""
        self.hub.kill()
        self.hub.wait()
        self.hub, _ = self.processes.enter_context(hub_process(self.run.root, self.log, verbose=True))

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """What the store says."""
        with closing(sqlite3.connect(self.run.root / "echo.db")) as books:
            return books.execute(query, values).fetchall()

    def wait_for_step(self, step: int, *, within_s: float) -> None:
        """Raises RunFailed."""
        until = time.monotonic() + within_s
        query = "SELECT coalesce(max(step), 0) FROM steps WHERE trained_at IS NOT NULL"
        while self.rows(query)[0][0] < step:
            if self.hub.poll() is not None or time.monotonic() > until:
                raise RunFailed(f"the run does not get on: see {self.scratch}")
            time.sleep(LOOK_S)

    def processor_s(self, module: str) -> float:
        """What the hub's child process that runs this module has computed."""
        for child in psutil.Process(self.hub.pid).children(recursive=True):
            if module in child.cmdline():
                times = child.cpu_times()
                return float(times.user + times.system)
        return 0.0

    @contextmanager
    def watched(self) -> Iterator[Health]:
        """Looks at the hub for as long as the block takes."""
        health, logs = Health(), self.logs()
        self.bystander.begin(self.hub.pid)
        try:
            yield health
        finally:
            seen = self.bystander.end()
            health.stall_s, health.growth_bytes = seen.stall_s, seen.growth_bytes
            for path in self.logs():
                said = path.read_bytes()[logs.get(path, 0) :]
                health.log_bytes += len(said)
                text = said.decode(errors="surrogateescape")
                health.is_log_plain = health.is_log_plain and printable(text) == text


def free_port() -> int:
    """One that nobody uses at this moment, for a hub that is to come back at it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def open_site(scratch: Path, *, seed: int, sections: Mapping[str, Mapping[str, Any]] | None = None) -> Iterator[Site]:
    """A hub without nodes; `sections` in place of its own settings."""
    scratch.mkdir()
    run = RunDirectory(scratch / "run")
    merged = {
        name: {**SETTINGS.get(name, {}), **(sections or {}).get(name, {})}
        for name in SETTINGS.keys() | (sections or {}).keys()
    }
    merged["run"] = {**merged["run"], "seed": seed}
    make_run(run, load_config(None, merged))
    certificate = merged["server"].get("tls_certificate")
    trust = ssl.create_default_context(cafile=certificate) if certificate else None
    with ExitStack() as processes:
        hub, url = processes.enter_context(hub_process(run.root, scratch / "hub.log", verbose=True))
        bystander = processes.enter_context(opened(url, authority=certificate or None))
        yield Site(url=url, run=run, scratch=scratch, processes=processes, hub=hub, bystander=bystander, trust=trust)
