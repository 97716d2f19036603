"""Nodes that are killed within their completions: does any node draw tokens again that the hub had?

The hub runs in this process; the nodes are real processes whose tokens take a known time. A node that has returned good
work is killed by SIGKILL while the hub has parts of its completions; another node takes its place. For each cut
rollout, the database says in the end which node drew which tokens. A token is *lost* if the hub had received it and a
later holder of the rollout drew it again. `since_told` counts the tokens that the killed node had drawn since its last
report (`counted_engine`); these must be drawn again in any case. Steps are trained meanwhile, so that the next holder
may have a newer version."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from benchmarks.backends.cases import lacks
from benchmarks.capacity.counted_engine import read_drawn
from benchmarks.capacity.paced_engine import DRAWN, TOKEN_S
from benchmarks.harness.processes import node_process
from benchmarks.harness.progress import Planned, Progress
from benchmarks.harness.site import Settings, merged
from echo_hub.config.file import load_config
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.serving.hub import Hub
from echo_hub.serving.opening import open_hub
from echo_shared.books import NodeTotals
from echo_shared.messages import ReceiptState

T = TypeVar("T")

CASE: Final = "kills"
KILLS: Final = 3
NODES: Final = 2
WIDTH: Final = 4
TOKENS_S: Final = 0.05
STREAM_S: Final = 1.0
TOLD: Final = 12
"""The kill waits until the hub has received this many tokens of one completion."""
LOOK_S: Final = 0.02
WITHIN_S: Final = 120.0

SETTINGS: Final[Settings] = {
    "run": {"name": "kills", "mode": "async"},
    "training": {"steps": 1000, "groups_per_step": 8, "group_size": 4, "lora_rank": 2, "max_staleness": 6},
    # No token is likely, nor is the end: completions are long.
    "sampling": {"temperature": 10.0, "max_tokens": 200},
    "evaluation": {"problems": 1},
    "learner": {"threads": 1},
    "server": {"port": 0, "heartbeat_s": 1.0, "shared_memory": False},
}

Rollout = tuple[int, int]
"""Group and index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Tokens that the hub had of the killed node's rollouts, and tokens that only the node had."""

    at: float
    had: Mapping[Rollout, int]
    since_told: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A finished rollout."""

    drawn_by: Sequence[tuple[str, int]]
    """Nodes in order, with the number of tokens that each drew."""
    holders: Mapping[str, float]
    """Time at which each node first got the rollout."""


@dataclass(slots=True, kw_only=True)
class _Run:
    """The hub, its database, and the nodes by name."""

    hub: Hub
    scratch: Path
    database: sqlite3.Connection
    processes: ExitStack
    nodes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    num_started: int = 0

    def start_node(self) -> None:
        self.num_started += 1
        home = self.scratch / f"node{self.num_started}"
        options = ["--backend", "llama_cpp", "--width", str(WIDTH), "--swarm-host", "127.0.0.1"]
        environment = {
            TOKEN_S: str(TOKENS_S),
            DRAWN: str(home.with_suffix(".drawn")),
            "ECHO_NODE_STREAM_S": str(STREAM_S),
            "ECHO_NODE_CAGE": "off",  # The engine writes a file.
        }
        module = "benchmarks.capacity.paced_node"
        process = node_process(self.hub.url, home, options, module=module, env=environment)
        self.nodes[home.name] = self.processes.enter_context(process)

    def held(self, node_id: str) -> list[tuple[int, int, int]]:
        """Lease, index and group of the node's unfinished rollouts."""
        query = 'SELECT lease_id, "index", group_id FROM rollouts WHERE node_id = ? AND state = ?'
        return self.database.execute(query, (node_id, ReceiptState.LEASED)).fetchall()

    def told(self, lease_id: int, index: int) -> int:
        """Tokens that the hub has of a rollout in progress."""
        prefix = self.hub.partials.prefix(lease_id, index)
        return 0 if prefix is None else len(prefix.ids)

    async def in_the_middle(self) -> NodeTotals | None:
        """Return a node that has returned good work, and of whose current work the hub has enough."""
        for node in await self.hub.pages.nodes():
            node_id = node.totals.node_id
            good = "SELECT 1 FROM rollouts WHERE node_id = ? AND reward IS NOT NULL LIMIT 1"
            has_enough = any(self.told(lease_id, index) >= TOLD for lease_id, index, _ in self.held(node_id))
            if node.connected and has_enough and self.database.execute(good, (node_id,)).fetchone():
                return node.totals
        return None

    async def is_away(self, node_id: str) -> bool:
        return not any(node.connected and node.totals.node_id == node_id for node in await self.hub.pages.nodes())

    async def finished(self, rollout: Rollout) -> Finished | None:
        """Return the rollout once it is finished."""
        holders = dict(
            self.database.execute(
                'SELECT node_id, min(leased_at) FROM rollouts WHERE group_id = ? AND "index" = ? GROUP BY node_id',
                rollout,
            ).fetchall()
        )
        found = self.database.execute(
            "SELECT rollouts.node_id, payloads.spans, length(payloads.completion_ids) / 4 FROM rollouts"
            ' JOIN payloads USING (lease_id, "index") WHERE group_id = ? AND "index" = ?',
            rollout,
        ).fetchone()
        if found is None:
            return None
        node_id, spans, num_tokens = found
        drawn_by = [(who, count) for who, _, count in json.loads(spans)] if spans else [(node_id, num_tokens)]
        return Finished(drawn_by=drawn_by, holders=holders)


def plan() -> list[Planned]:
    return [Planned(name=CASE, seconds=60, lacks=lacks("llama_cpp", "f32"))]


def measure(scratch: Path, progress: Progress, *, seed: int) -> list[dict[str, Any]]:
    """Kill nodes, and return one row for each kill."""
    if not progress.wants(CASE):
        return []
    rows = asyncio.run(_measure(scratch, seed))
    progress.done(CASE, {"lost": headline(rows), "had": sum(row["hub_had"] for row in rows)})
    return rows


def headline(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Lost tokens a kill."""
    return sum(row["lost"] for row in rows) / len(rows) if rows else None


def lost(had: int, killed_at: float, finished: Finished) -> int:
    """Count received tokens that a later holder of the rollout drew again."""
    kept = 0
    for node_id, count in finished.drawn_by:
        if finished.holders[node_id] > killed_at:
            break
        kept += count
    return max(0, had - kept)


async def _measure(scratch: Path, seed: int) -> list[dict[str, Any]]:
    config = load_config(None, merged(SETTINGS, {"run": {"seed": seed}}))
    directory = RunDirectory(scratch / "run")
    make_run(directory, config)
    chance = random.Random(seed)
    async with open_hub(config, directory) as hub, _serving(hub):
        with closing(sqlite3.connect(directory.root / "echo.db")) as database, ExitStack() as processes:
            run = _Run(hub=hub, scratch=scratch, database=database, processes=processes)
            for _ in range(NODES):
                run.start_node()
            kills = [await _kill_one(run, after_s=chance.uniform(0.0, STREAM_S)) for _ in range(KILLS)]
            return [await _row(number, kill, run) for number, kill in enumerate(kills, start=1)]


@asynccontextmanager
async def _serving(hub: Hub) -> AsyncIterator[None]:
    serving = asyncio.create_task(hub.serve())
    try:
        yield
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


async def _kill_one(run: _Run, *, after_s: float) -> Kill:
    """Kill the first node that is within its work, at some time between two of its reports, and start another node."""
    victim = None
    while victim is None:
        await _until(run.in_the_middle, "no node is within its work")
        await asyncio.sleep(after_s)
        victim = await run.in_the_middle()  # The node may have finished meanwhile.
    process = run.nodes.pop(victim.name)
    process.kill()
    await asyncio.to_thread(process.wait)
    killed_at, drawn = time.time(), read_drawn(run.scratch / f"{victim.name}.drawn")
    await _until(partial(run.is_away, victim.node_id), "the hub has not noticed the kill")
    had: dict[Rollout, int] = {}
    since_told = 0
    for lease_id, index, group_id in run.held(victim.node_id):
        told = run.told(lease_id, index)
        since_told += max(0, drawn.get((lease_id, index), told) - told)
        if told:
            had[group_id, index] = told
    run.start_node()
    return Kill(at=killed_at, had=had, since_told=since_told)


async def _row(number: int, kill: Kill, run: _Run) -> dict[str, Any]:
    finished = {one: await _until(partial(run.finished, one), "a cut rollout is not finished") for one in kill.had}
    return {
        "case": f"{CASE}, number {number}",
        "rollouts_cut": len(kill.had),
        "hub_had": sum(kill.had.values()),
        "lost": sum(lost(count, kill.at, finished[rollout]) for rollout, count in kill.had.items()),
        "since_told": kill.since_told,
        "gone_on": sum(len(one.drawn_by) > 1 for one in finished.values()),
    }


async def _until(look: Callable[[], Awaitable[T | None]], what: str) -> T:
    """Wait until `look` finds something, and return it. Raises TimeoutError."""
    give_up_at = time.monotonic() + WITHIN_S
    while not (found := await look()):
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"{what}, {WITHIN_S:.0f} s later")
        await asyncio.sleep(LOOK_S)
    return found
