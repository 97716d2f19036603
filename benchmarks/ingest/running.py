"""One case: the echo, then a hub, by the same connections and frames; and what is left of the hub when it is killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from sqlalchemy import select

from benchmarks.harness.broker import broker_process
from benchmarks.harness.postgresql import postgresql
from benchmarks.harness.processes import ended, hub_process, wait_until_ready
from benchmarks.ingest import lenders
from benchmarks.ingest.behind_gateways import gateway_processes, run_id_of, wait_until_taken
from benchmarks.ingest.cases import FRAMES, MOST_TOKENS, Case
from benchmarks.ingest.lender import Counts
from benchmarks.ingest.lenders import Lenders
from echo_hub.config.file import load_config
from echo_hub.run.base_model import resolve_base
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.store.database import connect
from echo_hub.store.tables import rollouts
from echo_shared.messages import ReceiptState, rollout_id
from echo_shared.process_memory import own_bytes

WARM_UP_S: Final = 4.0
"""After it the hub's nodes hold all that they can: fresh keys are given more with each round."""
NODES_PER_WARM_UP_S: Final = 500
"""More of them take longer."""
WINDOW_S: Final = 6.0
SETTLE_S: Final = 2.0
"""Behind a change of the load."""
ECHO_S: Final = 2.0
SCORER: Final = "echo_hub.scoring.warden"
CONTEXT_TOKENS: Final = MOST_TOKENS + 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What happened in a time."""

    seconds: float
    counts: Counts
    hub_s: float
    """Processor time of the process that was watched, all its threads."""
    scorers_s: float = 0.0
    gateways_s: float = 0.0

    def wait_ms(self, percent: float) -> float:
        """Of the time to the ack."""
        return float(np.percentile(self.counts.waits_s, percent)) * 1_000 if self.counts.waits_s else float("nan")

    def us_each(self, seconds: float) -> float:
        """Of a rollout, or a frame."""
        return seconds / max(1, self.counts.acked) * 1e6


def run(case: Case, directory: Path, *, seed: int) -> list[dict[str, Any]]:
    """A row for each size of frame. Raises RunFailed, LendersFailed and BrokerFailed."""
    echoed = _echo(case, seed=seed)
    base = _base(directory / "base")
    run_directory = RunDirectory(directory / "run")
    with ExitStack() as stack:
        broker = stack.enter_context(broker_process(directory)) if case.gateways else None
        store_url = stack.enter_context(postgresql()).url if case.server else ""
        broker_url = broker.url if broker else ""
        settings = case.settings(base, seed=seed, broker_url=broker_url, store_url=store_url)
        make_run(run_directory, load_config(None, settings))
        hub, hub_url = stack.enter_context(_hub(run_directory, directory))
        url, gateways = hub_url, None
        if broker is not None:
            log = directory / "gateways.log"
            gateways = stack.enter_context(gateway_processes(run_directory.root, url, log, number=case.gateways))
            url = gateways.url
        wait_until_ready(hub_url)
        before = own_bytes(hub.pid)
        nodes = stack.enter_context(lenders.opened("hub", url, count=case.nodes, capacity=case.capacity, seed=seed))
        per_connection = (own_bytes(hub.pid) - before) / case.nodes
        of_gateways = () if gateways is None else tuple(process.pid for process in gateways.processes)
        rows = [
            {
                "case": case.name,
                "nodes": case.nodes,
                "gateways": case.gateways,
                "server": case.server,
                "frame_bytes": frame_bytes,
                **_loads(case, (hub.pid, *of_gateways), nodes, frame_bytes, echoed[frame_bytes], is_first=place == 0),
                "bytes_per_connection": per_connection,
            }
            for place, frame_bytes in enumerate(FRAMES)
        ]
        _kill(hub)
        if broker is not None and gateways is not None:
            _kill(gateways.processes[0])
        acked = nodes.acked()
        if broker is not None:
            with _hub(run_directory, directory):
                wait_until_taken(broker, run_id_of(store_url or run_directory.database_url))
        lost = _lost(store_url or run_directory.database_url, acked)
    return [{**row, "lost": lost} for row in rows]


def _hub(run: RunDirectory, directory: Path) -> AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    return hub_process(run.root, directory / "hub.log", module="benchmarks.ingest.quick_hub")


def _loads(
    case: Case, pids: Sequence[int], nodes: Lenders, frame_bytes: int, echoed: Window, *, is_first: bool
) -> dict[str, Any]:
    nodes.load(frame_bytes)
    time.sleep(WARM_UP_S + case.nodes / NODES_PER_WARM_UP_S if is_first else SETTLE_S)
    full = _window(pids, nodes, WINDOW_S)
    rate = full.counts.acked / full.seconds
    nodes.load(frame_bytes, per_s=rate / 2)
    time.sleep(SETTLE_S)
    half = _window(pids, nodes, WINDOW_S)
    hub_us, echo_us = full.us_each(full.hub_s), echoed.us_each(echoed.hub_s)
    return {
        "acked_per_s": rate,
        "scored_over_acked": full.counts.scored / max(1, full.counts.acked),
        "dropped": full.counts.dropped + half.counts.dropped,
        "hub_us": hub_us,
        "scorers_us": full.us_each(full.scorers_s),
        "gateways_us": full.us_each(full.gateways_s),
        "echo_us": echo_us,
        "echo_per_s": echoed.counts.acked / echoed.seconds,
        "cpu_ratio_to_echo": echo_us / hub_us,
        "full_load_p50_ms": full.wait_ms(50),
        "full_load_p99_ms": full.wait_ms(99),
        "half_load_per_s": half.counts.acked / half.seconds,
        "half_load_hub_us": half.us_each(half.hub_s),
        "half_load_p50_ms": half.wait_ms(50),
        "half_load_p99_ms": half.wait_ms(99),
        "hub_busy": full.hub_s / full.seconds,
        "connections_ended": half.counts.ended,
    }


def _echo(case: Case, *, seed: int) -> dict[int, Window]:
    with _echo_process() as (server, url), lenders.opened("echo", url, count=case.nodes, seed=seed) as clients:
        windows = {}
        for frame_bytes in FRAMES:
            clients.load(frame_bytes)
            time.sleep(SETTLE_S)
            windows[frame_bytes] = _window((server.pid,), clients, ECHO_S)
        return windows


@contextmanager
def _echo_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "benchmarks.ingest.echo_server"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with ended(server):
        assert server.stdout is not None
        yield server, server.stdout.readline().strip()


def _window(pids: Sequence[int], of: Lenders, seconds: float) -> Window:
    """`pids`: of the hub or the echo, then of the gateways."""
    process, *gateways = [psutil.Process(pid) for pid in pids]
    scorers = [child for child in process.children() if SCORER in child.cmdline()]
    of.counts()
    began_at, hub_s, scorers_s = time.monotonic(), _processor_s([process]), _processor_s(_all(scorers))
    gateways_s = _processor_s(gateways)
    time.sleep(seconds)
    counts = of.counts()
    return Window(
        seconds=time.monotonic() - began_at,
        counts=counts,
        hub_s=_processor_s([process]) - hub_s,
        scorers_s=_processor_s(_all(scorers)) - scorers_s,
        gateways_s=_processor_s(gateways) - gateways_s,
    )


def _all(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """They, and what they have started."""
    return [one for process in processes for one in (process, *process.children(recursive=True))]


def _processor_s(processes: Sequence[psutil.Process]) -> float:
    """Of all their threads. Linux counts it to the nanosecond, and tells by a clock whose number is made of the
    process's (clock_getcpuclockid(3)); elsewhere it is told in ticks."""
    if sys.platform == "linux":
        return sum(time.clock_gettime((~process.pid << 3) | 2) for process in processes)
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


def _base(directory: Path) -> Path:
    """The built-in model, with room for long completions: nobody here computes with it."""
    shutil.copytree(resolve_base("builtin:tiny"), directory)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "max_position_embeddings": CONTEXT_TOKENS}))
    return directory


def _kill(hub: subprocess.Popen[str]) -> None:
    """At once, in mid-work."""
    hub.kill()
    hub.wait()


def _lost(url: str, acked: Sequence[str]) -> int:
    """How many of these rollouts the killed hub's store does not have as received, or further on."""
    engine = connect(url)
    with engine.connect() as connection:
        have = select(rollouts.c.lease_id, rollouts.c.index).where(rollouts.c.state != ReceiptState.LEASED)
        known = {rollout_id(lease_id, index) for lease_id, index in connection.execute(have)}
    engine.dispose()
    return len(set(acked) - known)
