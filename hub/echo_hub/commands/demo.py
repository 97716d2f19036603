"""`echo-hub demo`: train the base model with one hub and its nodes on this machine, then exit.

The nodes are ordinary `echo-node join` processes with their own data directories. They get all data over the network,
through the hub's port and from other nodes, as nodes on remote machines do.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final

from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from echo_hub.config.sections import HubConfig
from echo_hub.dashboard.model import FleetView, LengthsView, RunView
from echo_hub.run.directory import RunDirectory
from echo_hub.serving.hub import Hub
from echo_hub.serving.opening import open_hub
from echo_shared.errors import ConfigError, ConnectError
from echo_shared.installation import shell_line
from echo_shared.process.supervised import SupervisedChild
from echo_shared.wire.messages import ReceiptState

log = logging.getLogger(__name__)

LOG_LINES: Final = 5
NODE_STOP_S: Final = 8.0
PRECISION: Final = "q8_0"
"""Precision of the GGUF file that the demo writes."""
REFRESH_S: Final = 1.0
"""Seconds between two updates of the progress display. For each update, the run's views are read, which takes a
hundredth of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """The demo's results. `seconds` is the time from its start to the evaluation of the last version."""

    accuracy_before: float
    accuracy_after: float
    seconds: float
    policy_versions: int
    trained_by_node: dict[str, int]
    backend_by_node: dict[str, str]
    versions_by_transport: dict[str, int]
    leased: int
    trained: int
    dropped: dict[str, int]
    trained_tokens: LengthsView | None
    """Lengths in tokens of the newest trained completions; None if there are none."""
    dashboard_url: str
    adapter: str
    gguf: str | None = None
    """Path of the GGUF file with the trained model; None if the demo writes none."""


def missing_engine() -> str | None:
    """Return a line that tells how to install llama.cpp; None if llama.cpp is installed."""
    if importlib.util.find_spec("llama_cpp") is not None:
        return None
    command = f"{sys.executable} -m pip install llama-cpp-python"
    return f"llama.cpp is not installed, so both nodes sample with PyTorch. To install it (minutes): {command}"


def default_backends() -> tuple[str, str]:
    """Return the engines of the demo's two nodes: llama.cpp and PyTorch, or PyTorch twice if llama.cpp is not
    installed.

    PyTorch is always installed, because the hub requires it.
    """
    return ("llama_cpp" if missing_engine() is None else "torch", "torch")


async def run_demo(
    config: HubConfig,
    directory: RunDirectory,
    *,
    backends: tuple[str, ...],
    precision: str,
    gguf: bool,
    keep: bool,
    report_json: Path | None,
    spawned: SupervisedChild | None,
) -> None:
    """Run the demo to its end, or until it is cancelled. When this returns, all processes that it started have ended.

    `precision` is the precision of the nodes' engines. If `gguf`, the trained model is written as a GGUF file at the
    end. `spawned` is passed to `open_hub`. Raises ConnectError if a node ends before the run does.
    """
    started, console = time.monotonic(), Console()
    async with open_hub(config, directory, spawned=spawned) as hub, asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(hub.serve())
        async with _nodes(hub.url, directory.root / "nodes", backends, precision) as nodes:
            console.print(f"Dashboard    {hub.dashboard_url}\nLeaderboard  {hub.url}/leaderboard", soft_wrap=True)
            console.print(f"Run          {directory.root}\n")
            with _watched(nodes, tasks):
                await _show_until_finished(hub, console)
            report = await _report(hub, seconds=time.monotonic() - started)
            _print(report, console)
            if gguf:
                report = replace(report, gguf=await exported(directory, console))
            if report_json is not None:
                text = json.dumps(asdict(report), indent=2) + "\n"
                await asyncio.to_thread(report_json.write_text, text)
            if keep:
                console.print("\nThe hub stays up (--keep). Press Ctrl-C to end it.")
                await asyncio.Event().wait()
        serving.cancel()


async def exported(directory: RunDirectory, console: Console) -> str | None:
    """Write the newest version as a GGUF file, in a process of its own, and print how to use it. Return the file; None
    if llama.cpp, which writes it, is not installed.

    Raises ConfigError if the export fails.
    """
    hub = [sys.executable, "-m", "echo_hub"]
    talk = shell_line([*hub, "chat", str(directory.root)])
    console.print(f"To talk to it      {talk}", soft_wrap=True)
    destination = directory.root / "gguf"
    command = [*hub, "export", str(directory.root), str(destination), "--gguf", PRECISION]
    if importlib.util.find_spec("llama_cpp") is None:
        console.print(
            f"For llama.cpp      install llama.cpp as said above, then: {shell_line(command)}", soft_wrap=True
        )
        return None
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            await _end(process)
    if process.returncode:
        raise ConfigError(
            "The trained model could not be written as a GGUF file.",
            got="\n       ".join(said.decode(errors="replace").strip().splitlines()[-LOG_LINES:]),
            do=f"The adapter is complete. To try again: {shell_line(command)}",
        )
    (file,) = destination.glob("*.gguf")
    console.print(f"For llama.cpp      {file}", soft_wrap=True)
    return str(file)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    name: str
    process: asyncio.subprocess.Process
    log: Path


@asynccontextmanager
async def _nodes(url: str, root: Path, backends: tuple[str, ...], precision: str) -> AsyncIterator[list[_Node]]:
    nodes: list[_Node] = []
    try:
        for number, backend in enumerate(backends, start=1):
            name = f"node-{number}"
            nodes.append(await _start_node(url, root / name, name, backend=backend, precision=precision))
        yield nodes
    finally:
        await asyncio.gather(*(_end(node.process) for node in nodes))


@contextmanager
def _watched(nodes: list[_Node], tasks: asyncio.TaskGroup) -> Iterator[None]:
    """While the block runs, raise an error as soon as a node ends."""
    watchers = [tasks.create_task(_watch(node)) for node in nodes]
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.cancel()


async def _watch(node: _Node) -> None:
    status = await node.process.wait()
    said = await asyncio.to_thread(node.log.read_text, errors="replace")
    raise ConnectError(
        f"The demo's {node.name} ended before the run did, with status {status}.",
        got="\n       ".join(said.strip().splitlines()[-LOG_LINES:]),
        do=f"Its full output is in {node.log}.",
    )


def _open_log(log: Path) -> BinaryIO:
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("ab")


async def _start_node(url: str, home: Path, name: str, *, backend: str, precision: str) -> _Node:
    arguments = ["join", url, "--name", name, "--backend", backend, "--data-dir", str(home), "--threads", "1"]
    log = home / "node.log"
    with _open_log(log) as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "echo_node.main",
            *arguments,
            # When this process ends, for whatever reason, the pipe closes, and the node ends too.
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "ECHO_NODE_EXIT_WITH_STDIN": "true",
                "ECHO_NODE_BENCH_SECONDS": "0",
                "ECHO_NODE_PRECISION": precision,
                # With a node's default low priority, the learner on this machine would leave the nodes no processor
                # time.
                "ECHO_NODE_MANNERS__PRIORITY": "normal",
            },
            start_new_session=True,  # Ctrl-C in the terminal reaches only this process, which then stops the nodes.
        )
    return _Node(name=name, process=process, log=log)


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(NODE_STOP_S):
            await process.wait()
    except TimeoutError:
        log.warning("a node did not end in time and is killed")
        process.kill()
        await process.wait()


async def _show_until_finished(hub: Hub, console: Console) -> None:
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    steps = progress.add_task("step", total=hub.config.training.steps)
    with Live(console=console, auto_refresh=False) as live:
        finished = False
        while not finished:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await hub.progress.finished.wait()
            finished = hub.progress.finished.is_set()  # If set, the figures read below are final.
            view = await hub.pages.run_view()
            progress.update(steps, completed=view.trained_step)
            live.update(_table(progress, view, await hub.pages.nodes()), refresh=True)


def _table(progress: Progress, view: RunView, nodes: FleetView) -> Group:
    numbers = Table.grid(padding=(0, 2))
    numbers.add_row("mean reward", _number(view.mean_reward, ".3f"), "version", str(view.published_version))
    numbers.add_row("staleness", _number(view.staleness_mean, ".2f"), "rollouts/s", f"{view.rollouts_per_s:.0f}")
    fleet = Table("node", "backend", "doing", "version", "received", "trained", "tokens/s", box=SIMPLE)
    for node in nodes:
        doing = node.activity if node.connected else "away"
        version = "-" if node.policy_version is None else str(node.policy_version)
        counts = (str(node.totals.received), str(node.trained), f"{node.tokens_per_s:.0f}")
        fleet.add_row(escape(node.totals.name), escape(node.totals.backend), doing, version, *counts)
    return Group(progress, numbers, fleet)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


async def _report(hub: Hub, *, seconds: float) -> DemoReport:
    view, nodes = await hub.pages.run_view(), await hub.pages.nodes()
    accuracy_before, accuracy_after = view.accuracy_before, view.accuracy_after
    assert accuracy_before is not None and accuracy_after is not None  # A finished run has both accuracies.
    return DemoReport(
        accuracy_before=accuracy_before,
        accuracy_after=accuracy_after,
        seconds=seconds,
        policy_versions=view.published_version,
        trained_by_node={node.totals.name: node.trained for node in nodes},
        backend_by_node={node.totals.name: node.totals.backend for node in nodes},
        versions_by_transport={"swarm": 0, "web_seed": 0, **view.fetches_by_transport},
        leased=view.accounting.leased,
        trained=view.accounting.trained,
        dropped=dict(view.accounting.dropped),
        trained_tokens=next((of for of in view.work.lengths if of.outcome == ReceiptState.TRAINED), None),
        dashboard_url=f"{hub.url}/",
        adapter=str(hub.directory.adapter(view.published_version)),
    )


def _print(report: DemoReport, console: Console) -> None:
    console.print(f"\nHeld-out accuracy  {report.accuracy_before:.1%} before, {report.accuracy_after:.1%} after")
    console.print(f"Time               {report.seconds:.0f} s, {report.policy_versions} policy versions")
    if (tokens := report.trained_tokens) is not None:
        shares = f"10th percentile {tokens.p10}, 90th {tokens.p90}, longest {tokens.longest}"
        console.print(f"Completions        {tokens.mean:.0f} tokens on average, {shares}", soft_wrap=True)
    for name, trained in report.trained_by_node.items():
        console.print(f"{name:<18} {trained} trained rollouts ({report.backend_by_node[name]})")
    console.print(f"Adapter            {report.adapter}  (PeftModel.from_pretrained loads it)")
