"""Scoring in processes of the hub and in a Ray cluster on this machine: rollouts per second, and processor time.

The task is arithmetic. Its score takes microseconds, so the figures show the cost of the calls themselves. The
processor time is that of all processes: hub, scoring processes, and with Ray its driver, its actors and the rest of the
cluster.
"""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.harness.progress import Measurement, Planned, Progress
from benchmarks.harness.site import family, processor_s
from echo_hub.config.sections import HubConfig
from echo_hub.lifecycle.cluster_of_run import open_cluster
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems

DESCRIPTION: Final = "Rollouts scored per second by two processes of the hub, and by two Ray actors"
PROCESSES: Final = 2
CALLS: Final = 8_192
ROUNDS: Final = 5
GROUPS: Final = 64
CLUSTER_STARTS: Final = 3
"""Maximum number of attempts to start the cluster. On a busy machine Ray's agents may need more than 15 s to start;
then their raylet (Ray's process on each machine) ends.
"""
_STORE_BYTES: Final = 80 * 2**20


def plan() -> list[Planned]:
    lacks = "" if find_spec("ray") else "the extra `ray`"
    return [Planned(name="local", seconds=20), Planned(name="ray", seconds=60, lacks=lacks)]


def measure(seed: int, progress: Progress) -> Measurement:
    rows = []
    if progress.wants("local"):
        rows.append(asyncio.run(_measured("local", {}, seed)))
        progress.done("local", rows[-1])
    if progress.wants("ray"):
        with _cluster() as address:
            sections = {"scoring": {"engine": "ray"}, "ray": {"address": address}}
            rows.append(asyncio.run(_measured("ray", sections, seed)))
        progress.done("ray", rows[-1])
    headline = {f"{row['case']}: {name}": row[name] for row in rows for name in ("scored_per_s", "processor_us")}
    return Measurement(headline=headline, rows=rows, conditions={"calls": CALLS, "rounds": ROUNDS})


@contextmanager
def _cluster() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # Ray's processes inherit this and send no statistics.
    machine = {"num_cpus": PROCESSES, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
    for start in range(1, CLUSTER_STARTS + 1):
        try:
            cluster = Cluster(initialize_head=True, head_node_args=machine)
            break
        except Exception as error:
            if start == CLUSTER_STARTS:
                raise
            logging.warning("the cluster did not start, and is started again: %s", error)
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


async def _measured(case: str, sections: Mapping[str, Any], seed: int) -> dict[str, Any]:
    settings = {"run": {"seed": seed}, "task": {"scorer_processes": PROCESSES}, "evaluation": {"problems": 16}}
    config = HubConfig.model_validate({**settings, **sections})
    base_dir = resolve_base(config.model.base)
    problems = Problems.of_run(config, PromptCodec.of_run(config, base_dir))
    completion = problems.codec.encode_prompt("123")
    calls = [(number % GROUPS, [completion]) for number in range(CALLS)]
    rates, spent_us = [], []
    with tempfile.TemporaryDirectory(prefix="echo-scorers-") as logs:
        async with (
            open_cluster(config, base_dir, logs=Path(logs), kinds=("scorer",)) as cluster,
            ScoringPool.open(config, problems, base_dir=base_dir, logs=Path(logs), cluster=cluster) as pool,
        ):
            await asyncio.gather(*(pool.call("respond", calls[:512]) for _ in range(2 * PROCESSES)))
            for _ in range(ROUNDS):
                began_at, spent_s = time.perf_counter(), _processor_s()
                await pool.call("respond", calls)
                rates.append(CALLS / (time.perf_counter() - began_at))
                spent_us.append((_processor_s() - spent_s) / CALLS * 1e6)
    return {
        "case": case,
        "scored_per_s": statistics.median(rates),
        "least_per_s": min(rates),
        "most_per_s": max(rates),
        "processor_us": statistics.median(spent_us),
    }


def _processor_s() -> float:
    return processor_s(family(psutil.Process()))
