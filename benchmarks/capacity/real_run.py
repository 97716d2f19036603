"""One real run: a hub and its nodes as processes, each on a host of its own, and what their books say afterwards.

The hub is `paced_hub`, the nodes are `paced_node`: a real learner and real engines, whose steps and tokens take a known
time. Their hosts are network namespaces with shaped links (`benchmarks.dissemination.links`), so that a version takes
long to reach them.
A run ends when it has trained its steps; nothing of it is in this process but its books.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.capacity.paced_engine import TOKEN_S
from benchmarks.capacity.paced_learner import STEP_S
from benchmarks.dissemination.links import HUB, Links, LinkSet, Loopback, open_links
from benchmarks.harness.processes import hub_process, node_process, wait_for_steps
from echo_hub.config.file import load_config
from echo_hub.config.sections import HubConfig
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.store.store import Store
from echo_hub.views.pace import Pace, read_pace, read_steps
from echo_shared.books import StepRecord

NUM_NODES: Final = 2
SERVES_WITHIN_S: Final = 60.0
STEP_WITHIN_S: Final = 20.0
"""A run whose steps take longer than this on average has stalled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The nodes of a run, as alike as can be, and the learner's pace."""

    slots: int
    """Rollouts that they draw at once, all together."""
    token_s: float
    step_s: float

    def width(self, number: int) -> int:
        """The slots of one node; they count from 1."""
        return (self.slots + number - 1) // NUM_NODES


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """What is left of a run."""

    steps: tuple[StepRecord, ...]
    pace: Pace


def run(
    settings: Mapping[str, Mapping[str, Any]], fleet: Fleet, links: LinkSet, directory: Path, *, num_steps: int
) -> Books:
    """Plays a run until so many steps are trained. Raises RunFailed."""
    run_directory = RunDirectory(directory / "run")
    with open_links(NUM_NODES, links) as net, ExitStack() as processes:
        config = load_config(None, {**settings, "server": {"host": net.address(HUB), "port": 0}})
        make_run(run_directory, config)
        hub, url = processes.enter_context(_hub(net, fleet, directory))
        nodes = [
            processes.enter_context(_node(net, url, fleet, directory, number)) for number in range(1, 1 + NUM_NODES)
        ]
        within_s = SERVES_WITHIN_S + num_steps * STEP_WITHIN_S
        wait_for_steps(run_directory, num_steps, processes=[hub, *nodes], within_s=within_s)
    return _books(run_directory, config)


def _hub(
    net: Links | Loopback, fleet: Fleet, directory: Path
) -> AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    return hub_process(
        directory / "run",
        directory / "hub.log",
        module="benchmarks.capacity.paced_hub",
        within=net.command(HUB),
        env={STEP_S: str(fleet.step_s)},
    )


def _node(
    net: Links | Loopback, url: str, fleet: Fleet, directory: Path, number: int
) -> AbstractContextManager[subprocess.Popen[str]]:
    return node_process(
        url,
        directory / f"node{number}",
        ["--insecure", "--backend", "llama_cpp", "--width", str(fleet.width(number))],
        module="benchmarks.capacity.paced_node",
        within=net.command(number),
        env={TOKEN_S: str(fleet.token_s)},
    )


def _books(run_directory: RunDirectory, config: HubConfig) -> Books:
    store = Store.open(run_directory.database_url)
    try:
        steps = read_steps(store)
        pace = read_pace(store, config, steps, None)
    finally:
        store.close()
    assert pace is not None  # There are steps.
    return Books(steps=tuple(steps), pace=pace)
