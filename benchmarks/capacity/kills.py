"""Nodes that are killed in the middle of their completions: is anything drawn anew that the hub had?

A real hub in this process, and real nodes whose tokens take a known time. A node whose work has been good so far is
killed by SIGKILL while the hub has parts of completions that it is at; another node comes in its place. Of each
rollout that was cut, the books say in the end who drew which of its tokens: a token among those that the hub had is
*lost* if a node drew it that was given the rollout after the kill. What the killed node had drawn since it last told
the hub (`since_told`) nobody else knows; it is counted by the node's own engine (`counted_engine`), and has to be drawn
again in any case. Steps are trained meanwhile, so that the next holder may have a newer version.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from benchmarks.backends.cases import lacks
from benchmarks.capacity.counted_engine import read_drawn
from benchmarks.capacity.paced_engine import DRAWN, TOKEN_S
from benchmarks.harness.progress import Planned, Progress
from echo_hub.config.file import load_config
from echo_hub.hub import Hub
from echo_hub.opening import open_hub
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
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
"""Tokens that the hub has of one of its completions when a node is killed, at least."""
LOOK_S: Final = 0.02
WITHIN_S: Final = 120.0
"""What takes longer has stalled."""

SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "run": {"name": "kills", "mode": "async"},
    "training": {"steps": 1000, "groups_per_step": 8, "group_size": 4, "lora_rank": 2, "max_staleness": 6},
    # Nothing is likely, the end neither: completions are long.
    "sampling": {"temperature": 10.0, "max_tokens": 200},
    "evaluation": {"problems": 1},
    "learner": {"threads": 1},
    "server": {"port": 0, "heartbeat_s": 1.0, "shared_memory": False},
}

Rollout = tuple[int, int]
"""Group and index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """What the hub and the killed node had of the rollouts that the node was at."""

    at: float
    had: Mapping[Rollout, int]
    since_told: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One rollout as it came in."""

    drawn_by: Sequence[tuple[str, int]]
    """Nodes and how many tokens each drew, one after the other."""
    holders: Mapping[str, float]
    """When each node was first given it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    process: asyncio.subprocess.Process
    drawn: Path


class _Site:
    """The run: its hub, the nodes by their names, the hub's books."""

    def __init__(self, hub: Hub, scratch: Path, books: sqlite3.Connection) -> None:
        self.hub = hub
        self.scratch = scratch
        self.books = books
        self.nodes: dict[str, _Node] = {}
        self.num_started = 0


def plan() -> list[Planned]:
    return [Planned(name=CASE, seconds=60, lacks=lacks("llama_cpp", "f32"))]


def measure(scratch: Path, progress: Progress, *, seed: int) -> list[dict[str, Any]]:
    """One row a kill."""
    if not progress.wants(CASE):
        return []
    rows = asyncio.run(_measure(scratch, seed))
    progress.done(CASE, {"lost": headline(rows), "had": sum(row["hub_had"] for row in rows)})
    return rows


def headline(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Tokens that the hub had and that were drawn anew, a kill."""
    return sum(row["lost"] for row in rows) / len(rows) if rows else None


def lost(had: int, killed_at: float, finished: Finished) -> int:
    """Of the tokens that the hub had, how many a node drew anew that was given the rollout after the kill."""
    kept = 0
    for node_id, count in finished.drawn_by:
        if finished.holders[node_id] > killed_at:
            break
        kept += count
    return max(0, had - kept)


async def _measure(scratch: Path, seed: int) -> list[dict[str, Any]]:
    config = load_config(None, {**SETTINGS, "run": {**SETTINGS["run"], "seed": seed}})
    directory = RunDirectory(scratch / "run")
    make_run(directory, config)
    async with open_hub(config, directory) as hub, _serving(hub):
        with closing(sqlite3.connect(directory.root / "echo.db")) as books:
            site = _Site(hub, scratch, books)
            try:
                for _ in range(NODES):
                    await _start(site)
                chance = random.Random(seed)
                kills = [await _kill_one(site, after_s=chance.uniform(0.0, STREAM_S)) for _ in range(KILLS)]
                return [await _row(number, kill, site) for number, kill in enumerate(kills, start=1)]
            finally:
                await asyncio.gather(*(_end(node.process) for node in site.nodes.values()))


@asynccontextmanager
async def _serving(hub: Hub) -> AsyncIterator[None]:
    serving = asyncio.create_task(hub.serve())
    try:
        yield
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


async def _start(site: _Site) -> None:
    site.num_started += 1
    home = site.scratch / f"node{site.num_started}"
    arguments = ["join", site.hub.url, "--quiet", "--name", home.name, "--data-dir", str(home)]
    arguments += ["--backend", "llama_cpp", "--threads", "1", "--width", str(WIDTH), "--swarm-host", "127.0.0.1"]
    drawn = site.scratch / f"{home.name}.drawn"
    environment = {
        TOKEN_S: str(TOKENS_S),
        DRAWN: str(drawn),
        "OMP_NUM_THREADS": "1",
        "ECHO_NODE_STREAM_S": str(STREAM_S),
        "ECHO_NODE_EXIT_WITH_STDIN": "true",
        "ECHO_NODE_BENCH_SECONDS": "0",
        "ECHO_NODE_MANNERS__PRIORITY": "normal",
        "ECHO_NODE_CAGE": "off",  # Its engine writes down what it draws.
    }
    with (site.scratch / f"{home.name}.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.capacity.paced_node", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
        )
    site.nodes[home.name] = _Node(process=process, drawn=drawn)


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def _kill_one(site: _Site, *, after_s: float) -> Kill:
    """Kills the first node that is in the middle of its work, somewhere between two of its reports; another is started
    in its place."""
    victim = None
    while victim is None:
        await _until(lambda: _in_the_middle(site), "no node is in the middle of its work")
        await asyncio.sleep(after_s)
        victim = await _in_the_middle(site)  # It may be through by now.
    node = site.nodes.pop(victim.name)
    await _end(node.process)
    killed_at, drawn = time.time(), read_drawn(node.drawn)
    await _until(lambda: _is_away(site, victim.node_id), "the hub has not noticed the kill")
    had: dict[Rollout, int] = {}
    since_told = 0
    for lease_id, index, group_id in _held(site.books, victim.node_id):
        told = _told(site.hub, lease_id, index)
        since_told += max(0, drawn.get((lease_id, index), told) - told)
        if told:
            had[group_id, index] = told
    await _start(site)
    return Kill(at=killed_at, had=had, since_told=since_told)


async def _in_the_middle(site: _Site) -> NodeTotals | None:
    """A node that has returned something good, and of whose work the hub has enough."""
    for node in await site.hub.pages.nodes():
        node_id = node.totals.node_id
        good = "SELECT 1 FROM rollouts WHERE node_id = ? AND reward IS NOT NULL LIMIT 1"
        if node.connected and site.books.execute(good, (node_id,)).fetchone():
            held = _held(site.books, node_id)
            if any(_told(site.hub, lease_id, index) >= TOLD for lease_id, index, _ in held):
                return node.totals
    return None


async def _is_away(site: _Site, node_id: str) -> bool:
    return not any(node.connected and node.totals.node_id == node_id for node in await site.hub.pages.nodes())


def _held(books: sqlite3.Connection, node_id: str) -> list[tuple[int, int, int]]:
    """Lease, index and group of what is leased to the node and has not come in."""
    held = 'SELECT lease_id, "index", group_id FROM rollouts WHERE node_id = ? AND state = ?'
    return books.execute(held, (node_id, ReceiptState.LEASED)).fetchall()


def _told(hub: Hub, lease_id: int, index: int) -> int:
    prefix = hub.partials.prefix(lease_id, index)
    return 0 if prefix is None else len(prefix.ids)


async def _row(number: int, kill: Kill, site: _Site) -> dict[str, Any]:
    what = "what was cut is not finished"
    finished = {rollout: await _until(partial(_finished, site.books, rollout), what) for rollout in kill.had}
    return {
        "case": f"{CASE}, number {number}",
        "rollouts_cut": len(kill.had),
        "hub_had": sum(kill.had.values()),
        "lost": sum(lost(count, kill.at, finished[rollout]) for rollout, count in kill.had.items()),
        "since_told": kill.since_told,
        "gone_on": sum(len(one.drawn_by) > 1 for one in finished.values()),
    }


async def _finished(books: sqlite3.Connection, rollout: Rollout) -> Finished | None:
    """None while it has not come in."""
    holders = dict(
        books.execute(
            'SELECT node_id, min(leased_at) FROM rollouts WHERE group_id = ? AND "index" = ? GROUP BY node_id', rollout
        ).fetchall()
    )
    found = books.execute(
        "SELECT rollouts.node_id, payloads.spans, length(payloads.completion_ids) / 4 FROM rollouts"
        ' JOIN payloads USING (lease_id, "index") WHERE group_id = ? AND "index" = ?',
        rollout,
    ).fetchone()
    if found is None:
        return None
    node_id, spans, num_tokens = found
    drawn_by = [(who, count) for who, _, count in json.loads(spans)] if spans else [(node_id, num_tokens)]
    return Finished(drawn_by=drawn_by, holders=holders)


async def _until(look: Callable[[], Awaitable[T | None]], what: str) -> T:
    """What `look` finds, once it finds it. Raises TimeoutError."""
    until = time.monotonic() + WITHIN_S
    while not (found := await look()):
        if time.monotonic() > until:
            raise TimeoutError(f"{what}, {WITHIN_S:.0f} s later")
        await asyncio.sleep(LOOK_S)
    return found
