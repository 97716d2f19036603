"""Fixtures that start real hubs and nodes as processes of this checkout. Every process ends with its test, even if the
test fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import os
import re
import signal
import sqlite3
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import hypothesis
import psutil
import pytest
from typer.testing import CliRunner

from echo_hub.main import app
from tests.ray_cluster import RayCluster, ray_cluster
from tests.small_disk import SmallDisk, mounted

# Machines may be busy, so no Hypothesis example has a time limit.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

DEADLINE_S = 240.0
FOR_NODES = {"ECHO_NODE_BENCH_SECONDS": "0", "ECHO_NODE_MANNERS__PRIORITY": "normal", "ECHO_NODE_ROUTER_PORTS": "false"}
"""Environment of nodes: no measurement of speed, and normal priority. Nodes share this machine with their hub and with
other tests, so at the lowest priority they would starve.
"""
TRAINED_STEPS = "SELECT count(*) FROM steps WHERE trained_at IS NOT NULL"
OPERATORS: dict[str, dict[str, str]] = {}
"""HTTP headers of a logged-in operator, by the address of each hub in this test."""


def _logged_in(url: str, run: Path) -> dict[str, str]:
    OPERATORS[url] = {"Authorization": f"Bearer {(run / 'operator.token').read_text().strip()}"}
    return OPERATORS[url]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests with long time limits first: started last, such a test would keep one worker busy while the others are
    idle.
    """

    def may_take_s(item: pytest.Item) -> float:
        timeout = item.get_closest_marker("timeout")
        return float(timeout.args[0]) if timeout is not None and timeout.args else 0.0

    items.sort(key=may_take_s, reverse=True)


def pytest_unconfigure() -> None:
    """Close the null device, which llama-cpp-python opens twice at import and never closes."""
    opened = sys.modules.get("llama_cpp._utils")
    if opened is not None:
        opened.outnull_file.close()
        opened.errnull_file.close()


@pytest.fixture(scope="session")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return SmolLM2-135M-Instruct in Hugging Face layout; skip if its package is missing."""
    from benchmarks.harness.real_model import lacks, unpacked

    if lacking := lacks():
        pytest.skip(f"lacks {lacking}")
    return unpacked(tmp_path_factory.mktemp("real") / "SmolLM2-135M-Instruct")


UNFROZEN_TESTS = 50
"""Number of tests calling `gc.unfreeze` after which one full garbage collection runs."""
_num_unfreezing = 0


@pytest.fixture(autouse=True)
def _own_garbage() -> Iterator[None]:
    """Collect garbage after each test, so that a leak shows in the test that made it.

    Objects of imported modules and collected tests stay frozen: a full pass over them takes a second. Hub and simulator
    call `gc.unfreeze`, which would undo this; here such calls are only counted, and after `UNFROZEN_TESTS` tests with a
    call one full collection frees what these tests froze.
    """
    global _num_unfreezing
    unfreeze, called = gc.unfreeze, False

    @functools.wraps(unfreeze)
    def count() -> None:
        nonlocal called
        called = True

    gc.freeze()
    gc.unfreeze = count
    yield
    gc.unfreeze = unfreeze
    _num_unfreezing += called
    if _num_unfreezing >= UNFROZEN_TESTS:
        _num_unfreezing = 0
        gc.unfreeze()
    gc.collect()


class Running:
    """A process started by a test, with its output."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._printed = ""
        self._news = asyncio.Condition()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while chunk := await self.process.stdout.read(65_536):
            async with self._news:
                self._printed += chunk.decode(errors="replace")
                self._news.notify_all()
        async with self._news:
            self._news.notify_all()

    async def printed(self, pattern: str, *, within_s: float = DEADLINE_S) -> re.Match[str]:
        """Wait until the process has printed `pattern`."""
        async with asyncio.timeout(within_s), self._news:
            while (found := re.search(pattern, self._printed)) is None:
                assert not self._reader.done(), self._printed
                await self._news.wait()
        return found

    async def ended(self) -> tuple[int, str]:
        """Wait for the process to end; return its exit status and its whole output."""
        async with asyncio.timeout(DEADLINE_S):
            await self._reader
            return await self.process.wait(), self._printed

    async def show(self, name: str) -> None:
        print(f"--- {name}\n{self._printed}")

    async def kill(self) -> None:
        """Kill the process by SIGKILL; its children run on until they notice."""
        self.process.kill()
        await self.process.wait()

    async def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send the process a signal and wait for its end."""
        if self.process.returncode is None:
            # asyncio's own `send_signal` may reap a process that has just ended, so that its exit status is lost.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)
        return await self.ended()


class Site:
    """The hubs and nodes of one test; all their files are below one directory."""

    def __init__(self, root: Path, stack: AsyncExitStack) -> None:
        self.root = root
        self._stack = stack

    async def start(self, module: str, *arguments: str | Path) -> Running:
        """Start `python -m module` in this environment."""
        return await self.program(sys.executable, "-u", "-m", module, *arguments)

    async def program(self, *command: str | Path, env: Mapping[str, str] = os.environ) -> Running:
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**FOR_NODES, **env, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )
        self._stack.push_async_callback(_end_for_sure, process)
        running = Running(process)
        self._stack.push_async_callback(running.show, " ".join(map(str, command)))
        return running

    async def command(self, module: str, *arguments: str | Path) -> tuple[int, str]:
        return await (await self.start(module, *arguments)).ended()

    async def make_run(self, name: str = "run", *flags: str, **settings: dict[str, object]) -> Path:
        """Run `echo-hub init` with values so small that the run trains in seconds; `settings` override them, by
        section.
        """
        run = self.root / name
        # Runs in this process, because a new one would take a second.
        made = CliRunner().invoke(app, ["init", str(run), "--port", "0", *flags])
        assert made.exit_code == 0, (made.output, made.exception)
        small: dict[str, dict[str, object]] = {
            "training": {"steps": 4, "groups_per_step": 8, "group_size": 4, "lora_rank": 4},
            "learner": {"threads": 1},
            "evaluation": {"problems": 16},
            # Without shared memory, nodes on this machine fetch versions over the network, like nodes on other hosts.
            "server": {"heartbeat_s": 1.0, "shared_memory": False},
            # Few tests need the verifier (the process that re-computes rollouts), which costs as much as a second
            # learner.
            "trust": {"verifier": "off"},
        }
        self.change(run, {name: {**small.get(name, {}), **settings.get(name, {})} for name in small | settings})
        return run

    def change(self, run: Path, settings: Mapping[str, Mapping[str, object]]) -> None:
        text = (run / "config.toml").read_text()
        for section, values in settings.items():
            for key, value in values.items():
                text = _set(text, section, key, value)
        (run / "config.toml").write_text(text)

    async def hub(self, run: Path, *flags: str) -> tuple[Running, str]:
        """Start `echo-hub serve`, wait until it is ready, and return the process and its address."""
        hub = await self.start("echo_hub.main", "serve", run, *flags)
        url = (await hub.printed(r"Dashboard +(https?://\S+)/"))[1]
        _logged_in(url, run)
        return hub, url

    async def node(
        self,
        url: str,
        name: str,
        *flags: str,
        backend: str = "llama_cpp",
        env: Mapping[str, str] = os.environ,
        module: str = "echo_node.main",
    ) -> Running:
        """Start `echo-node join`; a second start with the same name uses the same data directory.

        llama.cpp is the default engine because it loads faster than PyTorch. Tests that expect a node's tokens to equal
        the hub's own samples need PyTorch.
        """
        home = self.root / name
        where = (
            "--data-dir",
            home,
            "--name",
            name,
            "--backend",
            backend,
            "--threads",
            "1",
            "--swarm-host",
            "127.0.0.1",
        )
        return await self.program(sys.executable, "-u", "-m", module, "join", url, *where, *flags, env=env)


def _set(text: str, section: str, key: str, value: object) -> str:
    head, mark, rest = text.partition(f"\n[{section}]\n")
    assert mark, f"no section {section}"
    replaced, count = re.subn(rf"(?m)^{key} = .*$", f"{key} = {json.dumps(value)}", rest, count=1)
    assert count, f"no setting {section}.{key}"
    return head + mark + replaced


async def _end_for_sure(process: asyncio.subprocess.Process) -> None:
    """Kill a process and all its children at once."""
    if process.returncode is not None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):  # The process has ended, but asyncio has not reported it yet.
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        assert psutil.wait_procs(children, timeout=60)[1] == [], "the processes do not end"
    await process.wait()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        yield Site(tmp_path, stack)


@pytest.fixture
def operator() -> Callable[..., dict[str, str]]:
    """Return `operator(url)`, which gives the headers of a logged-in operator. For a hub that `site` did not start,
    pass its `run`.
    """

    def headers(url: str, run: Path | None = None) -> dict[str, str]:
        return OPERATORS[url] if run is None else _logged_in(url, run)

    return headers


@pytest.fixture
def until() -> Callable[..., Any]:
    """Return `await until(url, condition)`, which follows the hub's event stream until `condition` is true of the run
    view. `authority` is a certificate to trust.
    """

    async def wait(
        url: str,
        condition: Callable[[dict[str, Any]], bool],
        authority: Path | None = None,
        *,
        within_s: float = DEADLINE_S,
    ) -> dict[str, Any]:
        forever = aiohttp.ClientTimeout(total=None)
        trusted = aiohttp.TCPConnector(ssl=True if authority is None else ssl.create_default_context(cafile=authority))
        async with (
            asyncio.timeout(within_s),
            aiohttp.ClientSession(timeout=forever, connector=trusted, headers=OPERATORS.get(url)) as http,
            http.get(f"{url}/api/v1/events") as stream,
        ):
            async for line in stream.content:
                if line.startswith(b"data:"):
                    async with http.get(f"{url}/api/v1/run") as answer:
                        view: dict[str, Any] = await answer.json()
                    if condition(view):
                        return view
        raise AssertionError("the hub's event stream ended")

    return wait


@pytest.fixture
def books() -> Callable[[Path], sqlite3.Connection]:
    """Return a function that opens a run's store read-only while the hub writes to it."""

    def open_books(run: Path) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{run / 'echo.db'}?mode=ro", uri=True)

    return open_books


@pytest.fixture
def reached(books: Callable[[Path], sqlite3.Connection]) -> Callable[..., Any]:
    """Return `await reached(run, 3)`, which waits until 3 steps are trained, or until `query` gives 3, and returns the
    number. It reads the database, because the hub's pages lag behind a fast run by dozens of steps.
    """

    async def wait(run: Path, least: int, query: str = TRAINED_STEPS) -> int:
        with contextlib.closing(books(run)) as database:
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    (count,) = database.execute(query).fetchone()
                    if count >= least:
                        return int(count)
                    await asyncio.sleep(0.02)

    return wait


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with mounted(tmp_path / "disk", 24 * 2**20) as disk:
        yield disk


@pytest.fixture(scope="session")
def cluster_of_all() -> Iterator[RayCluster]:
    with ray_cluster() as started:
        yield started


@pytest.fixture
def cluster(cluster_of_all: RayCluster) -> Iterator[RayCluster]:
    yield cluster_of_all
    cluster_of_all.settle()
