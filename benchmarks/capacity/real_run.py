"""One real run: hub and nodes run as processes on separate hosts, and the finished database gives the figures.

Learner and engines are real, but steps and tokens take a known time (`paced_learner`, `paced_node`). The hosts are
network namespaces with shaped links (`benchmarks.dissemination.links`), so that a version takes long to reach them. A
run ends when it has trained its steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.capacity.paced_engine import TOKEN_S
from benchmarks.capacity.paced_learner import STEP_S
from benchmarks.dissemination.links import HUB, LinkSet, open_links
from benchmarks.harness import hub_with_learner
from benchmarks.harness.hub_with_learner import LEARNER
from benchmarks.harness.processes import hub_process, node_process, wait_for_steps
from echo_hub.config.file import load_config
from echo_hub.config.sections import HubConfig
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.store.store import Store
from echo_hub.views.pace import Pace, newest_steps, read_pace
from echo_shared.books import StepRecord

NUM_NODES: Final = 2
SERVES_WITHIN_S: Final = 60.0
STEP_WITHIN_S: Final = 20.0
"""Mean time of a step after which a run counts as stalled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Pace of a run's nodes, which are alike, and of its learner."""

    slots: int
    """Rollouts that all nodes draw at once."""
    token_s: float
    step_s: float

    def width(self, number: int) -> int:
        """Slots of one node; nodes count from 1."""
        return (self.slots + number - 1) // NUM_NODES


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Steps and pace of a finished run, by its database."""

    steps: tuple[StepRecord, ...]
    pace: Pace


def run(
    settings: Mapping[str, Mapping[str, Any]], fleet: Fleet, links: LinkSet, directory: Path, *, num_steps: int
) -> Books:
    """Carry out a run until this many steps are trained. Raises RunFailed."""
    run_directory = RunDirectory(directory / "run")
    with open_links(NUM_NODES, links) as net, ExitStack() as processes:
        config = load_config(None, {**settings, "server": {"host": net.address(HUB), "port": 0}})
        make_run(run_directory, config)
        hub, url = processes.enter_context(
            hub_process(
                run_directory.root,
                directory / "hub.log",
                module=hub_with_learner.MODULE,
                within=net.command(HUB),
                env={LEARNER: "benchmarks.capacity.paced_learner", STEP_S: str(fleet.step_s)},
            )
        )
        nodes = [
            processes.enter_context(
                node_process(
                    url,
                    directory / f"node{number}",
                    ["--insecure", "--backend", "llama_cpp", "--width", str(fleet.width(number))],
                    module="benchmarks.capacity.paced_node",
                    within=net.command(number),
                    env={TOKEN_S: str(fleet.token_s)},
                )
            )
            for number in range(1, 1 + NUM_NODES)
        ]
        within_s = SERVES_WITHIN_S + num_steps * STEP_WITHIN_S
        wait_for_steps(run_directory, num_steps, processes=[hub, *nodes], within_s=within_s)
    return _books(run_directory, config)


def _books(run_directory: RunDirectory, config: HubConfig) -> Books:
    store = Store.open(run_directory.database_url)
    try:
        steps = newest_steps(store)
        pace = read_pace(store, config, steps, None)
    finally:
        store.close()
    assert pace is not None  # There are steps.
    return Books(steps=tuple(steps), pace=pace)
