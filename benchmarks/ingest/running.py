"""One case: the echo, then a hub, by the same connections and frames; then the database of the killed hub."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from sqlalchemy import select

from benchmarks.harness import hub_with_learner
from benchmarks.harness.broker import broker_process
from benchmarks.harness.hub_with_learner import LEARNER
from benchmarks.harness.postgresql import postgresql
from benchmarks.harness.processes import family, hub_process, processor_s, served, wait_until_ready
from benchmarks.ingest import lender
from benchmarks.ingest.behind_gateways import gateway_processes, run_id_of, wait_until_taken
from benchmarks.ingest.cases import FRAMES, MOST_TOKENS, Case
from benchmarks.ingest.lender import Counts, Lenders
from echo_hub.config.file import load_config
from echo_hub.run.base_model import resolve_base
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.store.database import connect
from echo_hub.store.tables import rollouts
from echo_shared.process.process_memory import own_bytes
from echo_shared.wire.messages import ReceiptState, rollout_id

WARM_UP_S: Final = 4.0
"""Seconds until nodes hold as many rollouts as they can: the hub gives more to new keys with each round."""
NODES_PER_WARM_UP_S: Final = 500
"""Number of nodes for which the warm-up lasts one second longer."""
WINDOW_S: Final = 6.0
SETTLE_S: Final = 2.0
"""Seconds to wait after a change of the load before measuring."""
ECHO_S: Final = 2.0
SCORER: Final = "echo_hub.scoring.warden"
CONTEXT_TOKENS: Final = MOST_TOKENS + 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Counts and processor times of one measured interval."""

    seconds: float
    counts: Counts
    hub_s: float
    """Processor seconds of the hub, or of the echo."""
    scorers_s: float = 0.0
    gateways_s: float = 0.0

    def wait_ms(self, percent: float) -> float:
        """Return a percentile of the time to the ack."""
        return float(np.percentile(self.counts.waits_s, percent)) * 1_000 if self.counts.waits_s else float("nan")

    def us_each(self, seconds: float) -> float:
        """Return microseconds per rollout, or per frame of the echo."""
        return seconds / max(1, self.counts.acked) * 1e6


def run(case: Case, directory: Path, *, seed: int) -> list[dict[str, Any]]:
    """Measure a case; one row for each size of frame. Raises RunFailed, LendersFailed and BrokerFailed."""
    echoed = _echo(case, directory / "echo.log", seed=seed)
    base = _base(directory / "base")
    run_directory = RunDirectory(directory / "run")
    with ExitStack() as stack:
        broker = stack.enter_context(broker_process(directory)) if case.gateways else None
        store_url = stack.enter_context(postgresql()).url if case.server else ""
        broker_url = broker.url if broker else ""
        settings = case.settings(base, seed=seed, broker_url=broker_url, store_url=store_url)
        make_run(run_directory, load_config(None, settings))
        hub, hub_url = stack.enter_context(_hub(run_directory, directory))
        url: str = hub_url
        gateways: list[subprocess.Popen[str]] = []
        if broker is not None:
            log = directory / "gateways.log"
            url, gateways = stack.enter_context(
                gateway_processes(run_directory.root, hub_url, log, number=case.gateways)
            )
        wait_until_ready(hub_url)
        before = own_bytes(hub.pid)
        nodes = stack.enter_context(lender.opened("hub", url, count=case.nodes, capacity=case.capacity, seed=seed))
        per_connection = (own_bytes(hub.pid) - before) / case.nodes
        of_gateways = tuple(process.pid for process in gateways)
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
        for gateway in gateways[:1]:
            _kill(gateway)
        acked = nodes.acked()
        if broker is not None:
            with _hub(run_directory, directory):
                wait_until_taken(broker, run_id_of(store_url or run_directory.database_url))
        lost = _lost(store_url or run_directory.database_url, acked)
    return [{**row, "lost": lost} for row in rows]


def _hub(run: RunDirectory, directory: Path) -> AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    return hub_process(
        run.root,
        directory / "hub.log",
        module=hub_with_learner.MODULE,
        env={LEARNER: "benchmarks.ingest.quick_learner"},
    )


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
        "hub_us": hub_us,
        "scorers_us": full.us_each(full.scorers_s),
        "gateways_us": full.us_each(full.gateways_s),
        "echo_us": echo_us,
        "cpu_ratio_to_echo": echo_us / hub_us,
        "half_load_p50_ms": half.wait_ms(50),
        "half_load_p99_ms": half.wait_ms(99),
        "connections_ended": half.counts.ended,
    }


def _echo(case: Case, log: Path, *, seed: int) -> dict[int, Window]:
    command = [sys.executable, "-m", "benchmarks.ingest.echo_server"]
    with (
        served(command, log, env={}, says="Echo") as (server, url),
        lender.opened("echo", url, count=case.nodes, seed=seed) as clients,
    ):
        windows = {}
        for frame_bytes in FRAMES:
            clients.load(frame_bytes)
            time.sleep(SETTLE_S)
            windows[frame_bytes] = _window((server.pid,), clients, ECHO_S)
        return windows


def _window(pids: Sequence[int], of: Lenders, seconds: float) -> Window:
    """Measure for some seconds. `pids` lists the process of hub or echo first, then gateway processes."""
    process, *gateways = [psutil.Process(pid) for pid in pids]
    scorers = [one for child in process.children() if SCORER in child.cmdline() for one in family(child)]
    of.counts()
    began_at, hub_s, scorers_s = time.monotonic(), processor_s([process]), processor_s(scorers)
    gateways_s = processor_s(gateways)
    time.sleep(seconds)
    counts = of.counts()
    return Window(
        seconds=time.monotonic() - began_at,
        counts=counts,
        hub_s=processor_s([process]) - hub_s,
        scorers_s=processor_s(scorers) - scorers_s,
        gateways_s=processor_s(gateways) - gateways_s,
    )


def _base(directory: Path) -> Path:
    """Copy the built-in model, with a longer context. No process computes with it."""
    shutil.copytree(resolve_base("builtin:tiny"), directory)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "max_position_embeddings": CONTEXT_TOKENS}))
    return directory


def _kill(hub: subprocess.Popen[str]) -> None:
    """Kill a process while it works."""
    hub.kill()
    hub.wait()


def _lost(url: str, acked: Sequence[str]) -> int:
    """Count acked rollouts that the database does not have as received, or in a later state."""
    engine = connect(url)
    with engine.connect() as connection:
        have = select(rollouts.c.lease_id, rollouts.c.index).where(rollouts.c.state != ReceiptState.LEASED)
        known = {rollout_id(lease_id, index) for lease_id, index in connection.execute(have)}
    engine.dispose()
    return len(set(acked) - known)
