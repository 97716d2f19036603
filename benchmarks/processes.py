"""Hubs and nodes as processes of a benchmark: started, watched, and ended however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Final

from echo_hub.run.directory import RunDirectory
from echo_hub.store.store import Store

ENDS_WITHIN_S: Final = 15.0
LOOK_S: Final = 0.5
READY_WITHIN_S: Final = 180.0


class RunFailed(Exception):
    """A process of the run has ended too early, or the run does not get on."""


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
    """The hub of a run directory, and its URL. `within`: a command that runs another, in a namespace say."""
    command = [*within, sys.executable, "-m", module, *(["--verbose"] if verbose else []), "serve", str(run)]
    with log.open("ab") as output:
        hub = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=output, env={**os.environ, **(env or {})}, text=True
        )
    with ended(hub):
        assert hub.stdout is not None
        for line in hub.stdout:
            if line.startswith("Leaderboard"):
                yield hub, line.split()[1].removesuffix("/leaderboard")
                return
        raise RunFailed(f"the hub has not begun to serve: see {log}")


def wait_until_ready(url: str, *, within_s: float = READY_WITHIN_S) -> None:
    """Until the hub can train: its learner may take long to start. Raises RunFailed."""
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
    """A node of one thread, whose data directory is `home` and whose log lies beside it. It ends with this process."""
    arguments = ["join", url, "--quiet", "--name", home.name, "--data-dir", str(home), "--threads", "1", *options]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ECHO_NODE_EXIT_WITH_STDIN": "true",
        "ECHO_NODE_BENCH_SECONDS": "0",
        "ECHO_NODE_MANNERS__PRIORITY": "normal",
        **(env or {}),
    }
    command = [*within, sys.executable, "-m", module, *arguments]
    with home.with_suffix(".log").open("ab") as log:
        node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, text=True)
    with ended(node):
        yield node


def wait_for_steps(
    run: RunDirectory, num_steps: int, *, processes: Sequence[subprocess.Popen[str]], within_s: float
) -> None:
    """Until so many steps are trained. Raises RunFailed when one of these processes, which do it, ends before that."""
    until = time.monotonic() + within_s
    store = Store.open(run.database_url, beside_hub=True)
    try:
        while (newest := store.newest_step()) is None or newest.step < num_steps:
            if any(process.poll() is not None for process in processes) or time.monotonic() > until:
                raise RunFailed(f"{newest.step if newest else 0} of {num_steps} steps: see {run.root.parent}")
            time.sleep(LOOK_S)
    finally:
        store.close()


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """However the block is left, the process has ended."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.communicate(timeout=ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
