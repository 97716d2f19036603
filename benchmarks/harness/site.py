"""Runs for tests and benchmarks: hub and node processes, and queries of the run's database."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.harness.hostile.engine import ATTACK, FORGED, SHARE
from echo_hub.config.file import load_config
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run

ENDS_WITHIN_S: Final = 15.0
LOOK_S: Final = 0.5
READY_WITHIN_S: Final = 180.0
ALONE: Final = {
    "OMP_NUM_THREADS": "1",
    "ECHO_NODE_BENCH_SECONDS": "0",
    "ECHO_NODE_MANNERS__PRIORITY": "normal",
}
"""Environment variables of a node that shares this machine with its hub and other nodes: one thread, no measurement of
its speed at the start, normal priority.
"""


class RunFailed(Exception):
    """A process of the run ended too early, or the run stalled."""


@contextmanager
def hub_process(
    run: Path,
    log: Path,
    *,
    module: str = "echo_hub.main",
    within: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    verbose: bool = False,
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `echo-hub serve` on a run directory; yield the hub's process and URL. `within` is the beginning of a command
    that runs another command, for instance in a network namespace. Raises RunFailed.
    """
    options = ["--verbose"] if verbose else []
    command = [*within, sys.executable, "-m", module, *options, "serve", str(run)]
    with served(command, log, env=env or {}, says="Leaderboard") as (hub, url):
        yield hub, url.removesuffix("/leaderboard")


@contextmanager
def served(
    command: Sequence[str], log: Path, *, env: Mapping[str, str], says: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server. Yield its process, and the address that it prints on the line that begins with `says`. Raises
    RunFailed.
    """
    with log.open("ab") as output:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, env={**os.environ, **env}, text=True)
    with ended(server):
        assert server.stdout is not None
        for line in server.stdout:
            if line.startswith(says):
                yield server, line.split()[1]
                return
        # The log's last lines go into the error, because the log is deleted when the benchmark ends.
        last = log.read_text("utf-8", errors="replace").splitlines()[-20:]
        raise RunFailed("\n".join([f"{' '.join(command[2:4])} ended before it served. Its log ends with:", *last]))


@contextmanager
def gateway_processes(
    run: Path, hub_url: str, log: Path, *, number: int
) -> Iterator[tuple[str, list[subprocess.Popen[str]]]]:
    """Start gateways behind one address; the system divides the connections among them. Yield their URL and their
    processes. Raises RunFailed.
    """
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:  # Keeps the port until the gateways use it.
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "echo_hub.main", "gateway", str(run), "--port", str(port)]
        env = {"ECHO_HUB_GATEWAYS__HUB_URL": hub_url}
        with ExitStack() as stack:
            gateways = [stack.enter_context(served(command, log, env=env, says="Gateway")) for _ in range(number)]
            taken.close()
            yield gateways[0][1], [process for process, _ in gateways]


def wait_until_ready(url: str) -> None:
    """Wait until the hub can train. Starting the learner may take long. Raises RunFailed."""
    give_up_at = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < give_up_at:
        try:
            with urllib.request.urlopen(f"{url}/readyz") as answer:
                if answer.status == HTTPStatus.OK:
                    return
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
        time.sleep(LOOK_S)
    raise RunFailed(f"the hub at {url} was not ready within {READY_WITHIN_S:g} s")


@contextmanager
def node_process(
    url: str,
    home: Path,
    options: Sequence[str],
    *,
    module: str = "echo_node.main",
    within: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Start a node with one thread. `home` is its data directory; its log lies next to it."""
    arguments = ["join", url, "--quiet", "--name", home.name, "--data-dir", str(home), "--threads", "1", *options]
    command = [*within, sys.executable, "-m", module, *arguments]
    environment = {**os.environ, **ALONE, "ECHO_NODE_EXIT_WITH_STDIN": "true", **(env or {})}
    with home.with_suffix(".log").open("ab") as log:
        node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, text=True)
    with ended(node):
        yield node


def wait_until(
    is_so: Callable[[], Any], *, processes: Sequence[subprocess.Popen[str]], within_s: float, where: Path
) -> Any:
    """Wait until `is_so` returns something true, and return that. Raises RunFailed if a process ends first, or after
    `within_s` seconds. The error names `where`, the place of the logs.
    """
    give_up_at = time.monotonic() + within_s
    while not (found := is_so()):
        if any(process.poll() is not None for process in processes) or time.monotonic() > give_up_at:
            raise RunFailed(f"the run does not continue: see {where}")
        time.sleep(LOOK_S)
    return found


def newest_step(run: Path) -> int:
    """Return the newest trained step of a run; 0 if there is none."""
    return int(read_rows(run, "SELECT coalesce(max(step), 0) FROM steps WHERE trained_at IS NOT NULL")[0][0])


def read_rows(run: Path, query: str, *values: object) -> list[tuple[Any, ...]]:
    """Return the rows of a query on a run's database. The hub may be running."""
    with closing(sqlite3.connect(f"file:{run / 'echo.db'}?mode=ro", uri=True, timeout=30.0)) as database:
        return database.execute(query, values).fetchall()


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Terminate the process when the block ends; kill it if it ignores the signal."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.communicate(timeout=ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def processor_s(processes: Iterable[psutil.Process]) -> float:
    """Return the processor seconds, over all threads, of those processes that still exist."""
    return sum(_processor_s(process) for process in processes)


def _processor_s(process: psutil.Process) -> float:
    """Return the processor seconds of one process. On Linux they come from the process's clock, in nanoseconds; the
    clock's number follows from the process id (clock_getcpuclockid(3)). Elsewhere they come from psutil, which counts
    ticks.
    """
    try:
        if sys.platform == "linux":
            return time.clock_gettime((~process.pid << 3) | 2)
        times = process.cpu_times()
    except (OSError, psutil.NoSuchProcess):
        return 0.0
    return float(times.user + times.system)


def memory_bytes(processes: Iterable[psutil.Process]) -> int:
    """Return the memory in bytes of those processes that still exist. Memory that processes share counts once (PSS)."""
    total = 0
    for process in processes:
        # The process may have ended, or may be a cage (sandbox), which hides its memory map.
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            memory = process.memory_full_info()
            total += getattr(memory, "pss", memory.rss)
    return total


Settings = Mapping[str, Mapping[str, Any]]
"""Sections of a config.toml, by name."""
SMALL_RUN: Final[Settings] = {
    "learner": {"threads": 1},
    "sampling": {"max_tokens": 6},
    "server": {"port": 0, "shared_memory": False},
}
"""Settings of a run with the default task (sums), for hub and nodes on one machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningNode:
    """A node's process. `forged` is the file with the ids of its forged rollouts."""

    name: str
    process: subprocess.Popen[str]
    forged: Path


@dataclass(slots=True, kw_only=True)
class Site:
    """A running hub and its nodes. All processes end with the block of `open_site`."""

    url: str
    run: RunDirectory
    scratch: Path
    hub: subprocess.Popen[str]
    processes: ExitStack
    _num_nodes: int = field(default=0)

    @property
    def token(self) -> str:
        return self.run.operator_token.read_text().strip()

    @property
    def log(self) -> Path:
        return self.scratch / "hub.log"

    def node(
        self, options: Sequence[str], *, attack: str = "", share: float = 1.0, within: Sequence[str] = ()
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
                env={ATTACK: attack, SHARE: str(share), FORGED: str(forged)},
            )
        )
        return RunningNode(name=home.name, process=process, forged=forged)

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return read_rows(self.run.root, query, *values)

    def newest_step(self) -> int:
        return newest_step(self.run.root)

    def wait_for_step(self, step: int, *, within_s: float) -> None:
        """Wait until the step is trained. Raises RunFailed."""
        self.wait_until(lambda: self.newest_step() >= step, within_s=within_s)

    def wait_until(self, is_so: Callable[[], Any], *, within_s: float) -> Any:
        """Wait until `is_so` returns something true, and return that. Raises RunFailed if the hub ends first."""
        return wait_until(is_so, processes=[self.hub], within_s=within_s, where=self.scratch)

    def processor_s(self, module: str = "") -> float:
        """Return the processor seconds of the hub's process; with `module`, those of its child process that runs
        `module`.
        """
        hub = psutil.Process(self.hub.pid)
        if not module:
            return processor_s([hub])
        return processor_s([child for child in hub.children(recursive=True) if module in child.cmdline()][:1])


def merged(settings: Settings, changes: Settings) -> dict[str, dict[str, Any]]:
    """Return `settings` with the values of `changes` in place of its own, section by section."""
    names = settings.keys() | changes.keys()
    return {name: {**settings.get(name, {}), **changes.get(name, {})} for name in names}


@contextmanager
def open_site(scratch: Path, settings: Settings, *, verbose: bool = False) -> Iterator[Site]:
    """Make a run below `scratch` and run its hub during the block. `settings` override those of SMALL_RUN."""
    scratch.mkdir(exist_ok=True)
    run = RunDirectory(scratch / "run")
    make_run(run, load_config(None, merged(SMALL_RUN, settings)))
    with serving(run, scratch, verbose=verbose) as site:
        yield site


@contextmanager
def serving(run: RunDirectory, scratch: Path, *, verbose: bool = False) -> Iterator[Site]:
    with ExitStack() as processes:
        hub, url = processes.enter_context(hub_process(run.root, scratch / "hub.log", verbose=verbose))
        yield Site(url=url, run=run, scratch=scratch, hub=hub, processes=processes)


def free_port() -> int:
    """Return a port of the loopback interface that no process uses now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
