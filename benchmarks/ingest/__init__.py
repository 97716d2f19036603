"""The hub's cost of a rollout, from the node's frame to the last receipt, and the number of nodes that one hub holds.

One process runs the hub with store, scorers and admission. Scripted nodes, which sample nothing, run in other
processes. For comparison, a third process only echoes the same frames: its cost is that of event loop and websocket
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
from benchmarks.harness.progress import Measurement, Planned, Progress, least, most
from benchmarks.harness.site import family, gateway_processes, hub_process, processor_s, served, wait_until_ready
from benchmarks.ingest import lender
from benchmarks.ingest.lender import Lenders
from echo_hub.config.file import load_config
from echo_hub.run.base_files import resolve_base
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
"""Approximate sizes in bytes of a rollout's frame (its encoded message). They correspond to completions of 210 and
1,960 tokens.
"""
NODES: Final = (10, 100, 1_000, 3_000)
GATEWAYS: Final = (1, 2, 4)
BEHIND_GATEWAYS: Final = 100
NODES_OF_SERVER: Final = (100, 1_000)
MOST_TOKENS: Final = 2_048
IN_FLIGHT: Final = 1_000
"""Number of rollouts that all nodes together hold at a time, or more: each node holds at least LEAST_HELD."""
LEAST_HELD: Final = 1
STEP_GROUPS: Final = 1_024
GROUP_SIZE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measured hub in one process, with its nodes and database."""

    nodes: int
    gateways: int = 0
    """Number of gateway processes in front of the hub; with 0, the hub itself holds the nodes' connections."""
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
"""Number of nodes for which the warm-up takes one more second."""
WINDOW_S: Final = 6.0
SETTLE_S: Final = 2.0
"""Seconds to wait after a change of the load before measuring."""
ECHO_S: Final = 2.0
SCORER: Final = "echo_hub.scoring.warden"
CONTEXT_TOKENS: Final = MOST_TOKENS + 256


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
    case: Case, pids: Sequence[int], nodes: Lenders, frame_bytes: int, echo_us: float, *, is_first: bool
) -> dict[str, Any]:
    nodes.load(frame_bytes)
    time.sleep(WARM_UP_S + case.nodes / NODES_PER_WARM_UP_S if is_first else SETTLE_S)
    full = _window(pids, nodes, WINDOW_S)
    nodes.load(frame_bytes, per_s=full["acked_per_s"] / 2)
    time.sleep(SETTLE_S)
    half = _window(pids, nodes, WINDOW_S)
    shown = ("acked_per_s", "scored_over_acked", "hub_us", "scorers_us", "gateways_us")
    return {
        **{name: full[name] for name in shown},
        "echo_us": echo_us,
        "cpu_ratio_to_echo": echo_us / full["hub_us"],
        "half_load_p50_ms": half["p50_ms"],
        "half_load_p99_ms": half["p99_ms"],
        "connections_ended": half["ended"],
    }


def _echo(case: Case, log: Path, *, seed: int) -> dict[int, float]:
    """Return the echo server's processor time per frame in microseconds, for each size of frame."""
    command = [sys.executable, "-m", "benchmarks.ingest.echo_server"]
    with (
        served(command, log, env={}, says="Echo") as (server, url),
        lender.opened("echo", url, count=case.nodes, seed=seed) as clients,
    ):
        found = {}
        for frame_bytes in FRAMES:
            clients.load(frame_bytes)
            time.sleep(SETTLE_S)
            found[frame_bytes] = _window((server.pid,), clients, ECHO_S)["hub_us"]
        return found


def _window(pids: Sequence[int], of: Lenders, seconds: float) -> dict[str, float]:
    """Measure for `seconds`. `pids` has the process of the hub or of the echo server first, then those of gateways.
    Processor times are in microseconds per acknowledged rollout.
    """
    process, *gateways = [psutil.Process(pid) for pid in pids]
    scorers = [one for child in process.children() if SCORER in child.cmdline() for one in family(child)]
    kinds = {"hub_us": [process], "scorers_us": scorers, "gateways_us": gateways}
    of.counts()
    began_at, before = time.monotonic(), {name: processor_s(those) for name, those in kinds.items()}
    time.sleep(seconds)
    counts, passed_s = of.counts(), time.monotonic() - began_at
    p50_s, p99_s = np.percentile(counts.waits_s, (50, 99)).tolist() if counts.waits_s else (float("nan"),) * 2
    return {
        **{name: (processor_s(kinds[name]) - before[name]) / max(1, counts.acked) * 1e6 for name in kinds},
        "acked_per_s": counts.acked / passed_s,
        "scored_over_acked": counts.scored / max(1, counts.acked),
        "p50_ms": 1_000 * p50_s,
        "p99_ms": 1_000 * p99_s,
        "ended": counts.ended,
    }


def _base(directory: Path) -> Path:
    """Copy the built-in model and give it a longer context. Only its tokenizer and configuration are used."""
    shutil.copytree(resolve_base("builtin:tiny"), directory)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "max_position_embeddings": CONTEXT_TOKENS}))
    return directory


def _kill(hub: subprocess.Popen[str]) -> None:
    hub.kill()
    hub.wait()


def _lost(url: str, acked: Sequence[str]) -> int:
    """Count acknowledged rollouts that the database does not have as received or in a later state."""
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

    `cpu_ratio_to_echo_1000`: the echo server's processor time per frame, divided by the hub's per rollout, with 1,000
    nodes and frames of 2 KB; `..._postgresql` excludes the database server's time. `cpu_ratio_hub_with_gateways`: the
    worst case with gateways, without the time of gateways and broker. `scored_over_acked` (at full load) and
    `p99_ack_ms_half_load` (at half the rate of full load) are the worst of all cases; `lost` is the sum over all cases.
    """
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
    many = [row for row in rows if row["nodes"] >= RATIO_NODES]
    of_ratio = [row for row in small if row["nodes"] == RATIO_NODES and not row["gateways"]]
    return {
        f"cpu_ratio_to_echo_{RATIO_NODES}": least((row for row in of_ratio if not row["server"]), "cpu_ratio_to_echo"),
        f"cpu_ratio_to_echo_{RATIO_NODES}_postgresql": least(
            (row for row in of_ratio if row["server"]), "cpu_ratio_to_echo"
        ),
        "cpu_ratio_hub_with_gateways": least((row for row in small if row["gateways"]), "cpu_ratio_to_echo"),
        "scored_over_acked": least(rows, "scored_over_acked"),
        "p99_ack_ms_half_load": most(rows, "half_load_p99_ms"),
        "lost": sum(row["lost"] for row in small),
        "bytes_per_connection": most(many, "bytes_per_connection"),
    }
