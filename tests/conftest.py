"""Fixtures that start real hubs and nodes as processes of this checkout. Every process ends with its test, even if the
test fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import gc
import os
import sqlite3
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import hypothesis
import pytest

from benchmarks.harness.live_site import DEADLINE_S, OPERATORS, LiveSite, live_site, logged_in
from echo_shared.process.importing import uncollected
from tests.ray_cluster import RayCluster, ray_cluster
from tests.small_disk import SmallDisk, mounted

# Machines may be busy, so no Hypothesis example has a time limit.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

CLUSTER = "cluster_of_all"
TRAINED_STEPS = "SELECT count(*) FROM steps WHERE trained_at IS NOT NULL"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without slow tests if only slow tests run: importing all files costs each worker half a minute."""
    if config.option.markexpr == "slow" and collection_path.match("test_*.py"):
        return "mark.slow" not in collection_path.read_text(encoding="utf-8") or None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Turn garbage collection off while all tests are imported: it would take long and free almost nothing."""
    with uncollected():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests with long time limits first: started last, such a test would keep one worker busy while the others are
    idle.

    xdist gives each worker an equal, connected part of the list. Slow tests are dealt out, so that each part begins
    with long ones. Tests of one file stay together, and so do those of the Ray cluster: they share fixtures.
    """
    items.sort(key=_may_take_s, reverse=True)
    together: dict[object, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is not None:
            key = CLUSTER if CLUSTER in getattr(item, "fixturenames", ()) else item.path
            together.setdefault(key, []).append(item)
    parts: list[list[pytest.Item]] = [[] for _ in range(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))]
    for tests in together.values():
        min(parts, key=len).extend(tests)
    slow = [item for part in parts for item in part]
    items[:] = slow + [item for item in items if item.get_closest_marker("slow") is None]


def _may_take_s(item: pytest.Item) -> float:
    timeout = item.get_closest_marker("timeout")
    return float(timeout.args[0]) if timeout is not None and timeout.args else 0.0


def pytest_unconfigure() -> None:
    """Close the null device, which llama-cpp-python opens twice at import and never closes."""
    opened = sys.modules.get("llama_cpp._utils")
    if opened is not None:
        opened.outnull_file.close()
        opened.errnull_file.close()


@pytest.fixture(scope="session")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return SmolLM2-135M-Instruct in Hugging Face layout; skip if its package is missing. The workers of xdist share
    one copy, because writing it takes 20 s of a core.
    """
    from benchmarks.harness.real_model import lacks, unpacked

    if lacking := lacks():
        pytest.skip(f"lacks {lacking}")
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with (shared / "real_model.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return unpacked(shared / "SmolLM2-135M-Instruct")


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


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[LiveSite]:
    async with live_site(tmp_path) as started:
        yield started


@pytest.fixture
def operator() -> Callable[..., dict[str, str]]:
    """Return `operator(url)`, which gives the HTTP headers of a logged-in operator. For a hub that `site` did not
    start, pass its `run`.
    """

    def headers(url: str, run: Path | None = None) -> dict[str, str]:
        return OPERATORS[url] if run is None else logged_in(url, run)

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
    """Return a function that opens a run's database read-only while the hub writes to it."""

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
