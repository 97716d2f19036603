"""Hubs and nodes as processes of a benchmark. Each process ends when its `with` block is left, also by an error."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Final

import psutil

from echo_hub.run.directory import RunDirectory
from echo_hub.store.reports import read_newest_step
from echo_hub.store.store import Store

ENDS_WITHIN_S: Final = 15.0
LOOK_S: Final = 0.5
READY_WITHIN_S: Final = 180.0
ALONE: Final = {
    "OMP_NUM_THREADS": "1",
    "ECHO_NODE_BENCH_SECONDS": "0",
    "ECHO_NODE_MANNERS__PRIORITY": "normal",
}
"""Environment of a node that shares this machine with the rest of its run."""


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
    """Serve a run directory; yield the hub's process and URL. `within` is a command that runs another command, for
    instance in a network namespace. Raises RunFailed."""
    options = ["--verbose"] if verbose else []
    command = [*within, sys.executable, "-m", module, *options, "serve", str(run)]
    with served(command, log, env=env or {}, says="Leaderboard") as (hub, url):
        yield hub, url.removesuffix("/leaderboard")


@contextmanager
def served(
    command: Sequence[str], log: Path, *, env: Mapping[str, str], says: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server; yield it and the address on the line that begins with `says`. Raises RunFailed."""
    with log.open("ab") as output:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, env={**os.environ, **env}, text=True)
    with ended(server):
        assert server.stdout is not None
        for line in server.stdout:
            if line.startswith(says):
                yield server, line.split()[1]
                return
        raise RunFailed(f"{' '.join(command[2:4])} ended before it served: see {log}")


def wait_until_ready(url: str, *, within_s: float = READY_WITHIN_S) -> None:
    """Wait until the hub can train: its learner may take long to start. Raises RunFailed."""
    give_up_at = time.monotonic() + within_s
    while time.monotonic() < give_up_at:
        try:
            with urllib.request.urlopen(f"{url}/readyz") as answer:
                if answer.status == HTTPStatus.OK:
                    return
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
        time.sleep(LOOK_S)
    raise RunFailed(f"the hub at {url} was not ready within {within_s:g} s")


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
    """Start a node of one thread. Its data directory is `home`; its log lies next to it."""
    arguments = ["join", url, "--quiet", "--name", home.name, "--data-dir", str(home), "--threads", "1", *options]
    command = [*within, sys.executable, "-m", module, *arguments]
    environment = {**os.environ, **ALONE, "ECHO_NODE_EXIT_WITH_STDIN": "true", **(env or {})}
    with home.with_suffix(".log").open("ab") as log:
        node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, text=True)
    with ended(node):
        yield node


def wait_for_steps(
    run: RunDirectory, num_steps: int, *, processes: Sequence[subprocess.Popen[str]], within_s: float
) -> None:
    """Wait until this many steps are trained. Raises RunFailed if one of the processes ends before that."""
    give_up_at = time.monotonic() + within_s
    store = Store.open(run.database_url, beside_hub=True)
    try:
        while (newest := store.read(read_newest_step)) is None or newest.step < num_steps:
            if any(process.poll() is not None for process in processes) or time.monotonic() > give_up_at:
                raise RunFailed(f"{newest.step if newest else 0} of {num_steps} steps: see {run.root.parent}")
            time.sleep(LOOK_S)
    finally:
        store.close()


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Terminate the process when the block ends; kill a process that ignores the signal."""
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
    """Return a process and all of its descendants."""
    return [process, *process.children(recursive=True)]


def processor_s(processes: Iterable[psutil.Process]) -> float:
    """Processor seconds of the processes that still exist, all threads included."""
    return sum(_processor_s(process) for process in processes)


def _processor_s(process: psutil.Process) -> float:
    """Linux counts in nanoseconds, in a clock whose number follows from the process id (clock_getcpuclockid(3));
    psutil counts in ticks."""
    try:
        if sys.platform == "linux":
            return time.clock_gettime((~process.pid << 3) | 2)
        times = process.cpu_times()
    except (OSError, psutil.NoSuchProcess):
        return 0.0
    return float(times.user + times.system)
