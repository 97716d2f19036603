"""The hub's cost of a rollout from a node's frame to its receipts, and the number of nodes that one hub holds.

One process runs the hub with store, scorers and admission. Handwritten nodes, which sample nothing, have other
processes. A process that only echoes the same frames is the yardstick: it shows the cost of event loop and websocket
library. Costs are processor time by process, so that a busy machine changes them little. Each case ends by killing the
hub and looking up every acked rollout in the database. If gateways hold the connections, one gateway is killed at the
same moment, and the hub is started again to read the rest from the broker.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from sqlalchemy import select

from benchmarks.harness import broker, hub_with_learner, postgresql
from benchmarks.harness.broker import run_id_of, wait_until_taken
from benchmarks.harness.hub_with_learner import LEARNER
from benchmarks.harness.progress import Measurement, Planned, Progress
from benchmarks.harness.site import family, gateway_processes, hub_process, processor_s, served, wait_until_ready
from benchmarks.ingest import lender
from benchmarks.ingest.lender import Counts, Lenders
from echo_hub.config.file import load_config
from echo_hub.run.base_model import resolve_base
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.store.database import connect
from echo_hub.store.tables import rollouts
from echo_shared.process.process_memory import own_bytes
from echo_shared.wire.messages import ReceiptState, rollout_id

DESCRIPTION: Final = (
    "Rollouts that many nodes send to one hub: the hub's processor time, compared with a server that only echoes the "
    "same frames; rollouts acknowledged and scored per second at full load; time to the acknowledgement at half load; "
    "memory per connection; acknowledged rollouts that a killed hub has lost"
)

FRAMES: Final = (2_000, 16_000)
"""Approximate bytes of a rollout's frame: completions of 210 and 1,960 tokens."""
NODES: Final = (10, 100, 1_000, 3_000)
GATEWAYS: Final = (1, 2, 4)
BEHIND_GATEWAYS: Final = 100
NODES_OF_SERVER: Final = (100, 1_000)
MOST_TOKENS: Final = 2_048
IN_FLIGHT: Final = 1_000
"""Minimum number of rollouts that all nodes together hold."""
LEAST_HELD: Final = 1
STEP_GROUPS: Final = 1_024
GROUP_SIZE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measured hub in one process, with its nodes and database."""

    nodes: int
    gateways: int = 0
    """Number of gateway processes before the hub; 0: the hub itself holds the nodes' connections."""
    server: bool = False
    """True for PostgreSQL, False for SQLite."""

    @property
    def name(self) -> str:
        store = "PostgreSQL" if self.server else "SQLite"
        if self.gateways:
            return f"{self.nodes:,} nodes, {self.gateways} gateway{'s' if self.gateways > 1 else ''}, {store}"
        return f"{self.nodes:,} nodes, one process, {store}"

    @property
    def seconds(self) -> float:
        return 50 + self.nodes / 40 + (20 if self.gateways else 0)

    @property
    def lacks(self) -> str:
        """Return why this machine cannot measure the case; "" if it can."""
        return (broker.lacking() if self.gateways else "") or (postgresql.lacking() if self.server else "")

    @property
    def capacity(self) -> int:
        return max(LEAST_HELD, IN_FLIGHT // self.nodes)

    def settings(
        self, base: Path, *, seed: int, broker_url: str = "", store_url: str = ""
    ) -> Mapping[str, Mapping[str, Any]]:
        """Return the hub's settings. No model sampled the nodes' rollouts, so no verifier checks them."""
        most = 1_000_000
        return {
            "run": {"name": "ingest", "seed": seed},
            "model": {"base": str(base)},
            "store": {"url": store_url},
            "task": {"name": "arithmetic", "scorer_processes": 1},
            "sampling": {"max_tokens": MOST_TOKENS},
            "training": {"steps": 100_000, "groups_per_step": STEP_GROUPS, "group_size": GROUP_SIZE},
            "learner": {"threads": 1, "checkpoint_every": 1_000},
            "trust": {"verifier": "off"},
            "evaluation": {"problems": 1, "every": 0},
            "dissemination": {"way": "web_seed"},
            "server": {
                "port": 0,
                "shared_memory": False,
                "joins_per_s": 10_000,
                "connections_per_s": most,
                "connections_per_s_per_address": most,
                "requests_per_s": most,
                "requests_per_s_per_address": most,
                "max_nodes_per_address": most,
                "trusted_proxies": ["127.0.0.1"] if broker_url else [],
            },
            "gateways": {"url": broker_url},
        }


CASES: Final = (
    *(Case(nodes=nodes) for nodes in NODES),
    *(Case(nodes=nodes, server=True) for nodes in NODES_OF_SERVER),
    *(Case(nodes=BEHIND_GATEWAYS, gateways=number) for number in GATEWAYS),
)


WARM_UP_S: Final = 4.0
"""Seconds until the nodes hold as many rollouts as they can: the hub leases few rollouts to new keys, and more in each
round.
"""
NODES_PER_WARM_UP_S: Final = 500
"""Number of nodes that makes the warm-up one second longer."""
WINDOW_S: Final = 6.0
SETTLE_S: Final = 2.0
"""Seconds to wait after a change of the load before measuring."""
ECHO_S: Final = 2.0
SCORER: Final = "echo_hub.scoring.warden"
CONTEXT_TOKENS: Final = MOST_TOKENS + 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    seconds: float
    counts: Counts
    hub_s: float
    """Processor seconds of the hub, or of the echo server."""
    scorers_s: float = 0.0
    gateways_s: float = 0.0

    def wait_ms(self, percent: float) -> float:
        """Return a percentile of the time to the ack, in milliseconds."""
        return float(np.percentile(self.counts.waits_s, percent)) * 1_000 if self.counts.waits_s else float("nan")

    def us_each(self, seconds: float) -> float:
        return seconds / max(1, self.counts.acked) * 1e6


def run(case: Case, directory: Path, *, seed: int) -> list[dict[str, Any]]:
    """Measure a case; return one row for each size of frame. Raises RunFailed, LendersFailed and BrokerFailed."""
    echoed = _echo(case, directory / "echo.log", seed=seed)
    base = _base(directory / "base")
    run_directory = RunDirectory(directory / "run")
    with ExitStack() as stack:
        nats = stack.enter_context(broker.broker_process(directory)) if case.gateways else None
        store_url = stack.enter_context(postgresql.postgresql()).url if case.server else ""
        broker_url = nats.url if nats else ""
        settings = case.settings(base, seed=seed, broker_url=broker_url, store_url=store_url)
        make_run(run_directory, load_config(None, settings))
        hub, hub_url = stack.enter_context(_hub(run_directory, directory))
        url: str = hub_url
        gateways: list[subprocess.Popen[str]] = []
        if nats is not None:
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
        if nats is not None:
            with _hub(run_directory, directory):
                wait_until_taken(nats, run_id_of(store_url or run_directory.database_url))
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
    """Measure for `seconds`. `pids`: the process of the hub or the echo server first, then those of gateways."""
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
    """Copy the built-in model and give it a longer context. No process computes with it."""
    shutil.copytree(resolve_base("builtin:tiny"), directory)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "max_position_embeddings": CONTEXT_TOKENS}))
    return directory


def _kill(hub: subprocess.Popen[str]) -> None:
    hub.kill()
    hub.wait()


def _lost(url: str, acked: Sequence[str]) -> int:
    """Count acked rollouts that the database has neither as received nor in a later state."""
    engine = connect(url)
    with engine.connect() as connection:
        have = select(rollouts.c.lease_id, rollouts.c.index).where(rollouts.c.state != ReceiptState.LEASED)
        known = {rollout_id(lease_id, index) for lease_id, index in connection.execute(have)}
    engine.dispose()
    return len(set(acked) - known)


SHOWN: Final = (
    "case",
    "frame_bytes",
    "acked_per_s",
    "scored_over_acked",
    "hub_us",
    "scorers_us",
    "echo_us",
    "cpu_ratio_to_echo",
    "half_load_p50_ms",
    "half_load_p99_ms",
    "lost",
)
RATIO_NODES: Final = 1_000


def plan() -> list[Planned]:
    return [Planned(name=case.name, seconds=case.seconds, lacks=case.lacks) for case in CASES]


def measure(seed: int, progress: Progress) -> Measurement:
    """Measure all wanted cases.

    `cpu_ratio_to_echo_1000`: the echo server's processor time per frame over the hub's per rollout, with 1,000 nodes
    and frames of 2 KB; `..._postgresql` excludes the database server's time. `cpu_ratio_hub_with_gateways`: the worst
    case with gateways, without the time of gateways and broker. The other figures are the worst of all cases:
    `scored_over_acked` at full load, `p99_ack_ms_half_load` at half the rate of full load, `lost` as a sum.
    """
    from benchmarks.ingest import run

    rows: list[dict[str, Any]] = []
    for case in CASES:
        if not progress.wants(case.name):
            continue
        with tempfile.TemporaryDirectory(prefix="echo-ingest-") as directory:
            rows += run(case, Path(directory), seed=seed)
        progress.so_far = Measurement(headline=headline(rows), rows=rows, shown=SHOWN)
        told = rows[-len(FRAMES)]
        progress.done(case.name, {key: told[key] for key in SHOWN[2:]})
    return Measurement(headline=headline(rows), rows=rows, shown=SHOWN)


def headline(rows: list[dict[str, Any]]) -> dict[str, Any]:
    small = [row for row in rows if row["frame_bytes"] == FRAMES[0]]
    of_ratio = [row for row in small if row["nodes"] == RATIO_NODES and not row["gateways"] and not row["server"]]
    of_server = [row for row in small if row["nodes"] == RATIO_NODES and row["server"]]
    behind_gateways = [row["cpu_ratio_to_echo"] for row in small if row["gateways"]]
    of_connections = [row["bytes_per_connection"] for row in rows if row["nodes"] >= RATIO_NODES]
    return {
        f"cpu_ratio_to_echo_{RATIO_NODES}": next((row["cpu_ratio_to_echo"] for row in of_ratio), None),
        f"cpu_ratio_to_echo_{RATIO_NODES}_postgresql": next((row["cpu_ratio_to_echo"] for row in of_server), None),
        "cpu_ratio_hub_with_gateways": min(behind_gateways, default=None),
        "scored_over_acked": min((row["scored_over_acked"] for row in rows), default=None),
        "p99_ack_ms_half_load": max((row["half_load_p99_ms"] for row in rows), default=None),
        "lost": sum(row["lost"] for row in small),
        "bytes_per_connection": max(of_connections, default=None),
    }
