"""Several runs of one hub, with separate stores and processes, list each other on their pages."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from echo_hub.config.file import load_config
from echo_hub.dashboard.source import Changes
from echo_hub.lifecycle.sibling_runs import ADDRESS, SiblingRuns
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.board import read_board
from echo_hub.store.database import write_meta
from echo_hub.store.store import Store
from echo_shared.records.credit import BoardQuery
from echo_shared.signing import key_file
from tests.echo_hub.store.conftest import Records

URL = "http://127.0.0.1:8711"


def made(path: Path, name: str, beside: RunDirectory | None = None) -> RunDirectory:
    run = RunDirectory(path)
    make_run(run, load_config(None, {"run": {"name": name}, "training": {"steps": 9}}), beside=beside)
    return run


def serve(run: RunDirectory, number: int) -> Store:
    store = Store.open(run.database_url)
    store.write(write_meta, "run_id", f"{key_file.load(run.key).node_id}-{number}")
    return store


def work(store: Store, step: int) -> None:
    """Record a step of two rollouts, five tokens together."""
    store.node_seen(node_id="a", public_key=bytes(32), name="ada", backend="torch", device="d", now=1.0)
    store.apply(Records.one_step(step, lease_id=step, group_id=step, node_id="a"), now=float(step))


@asynccontextmanager
async def looking(run: RunDirectory, store: Store, number: int) -> AsyncIterator[SiblingRuns]:
    opened = AsyncStore(store)
    key = key_file.load(run.key)
    yield SiblingRuns(run, opened, run_id=f"{key.node_id}-{number}", hub_key=key.public_key, changes=Changes())
    await opened.close()


def elsewhere(store: Store) -> dict[str, tuple[int, int]]:
    rows = store.read(read_board, BoardQuery(), now=9.0).rows
    return {row.name: (row.rollouts, row.elsewhere_rollouts) for row in rows}


async def test_work_in_one_run_counts_on_the_other_runs_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(10)
    monkeypatch.setattr("echo_hub.lifecycle.sibling_runs.time.time", lambda: float(next(seconds)))
    first = made(tmp_path / "first", "first")
    second = made(tmp_path / "second", "the second", beside=first)
    here, there = serve(first, 1), serve(second, 2)
    there.write(write_meta, ADDRESS, URL)
    async with looking(first, here, 1) as siblings:
        await siblings.look()
        (view,) = siblings.views
        assert (view.name, view.address, view.trained_step, view.steps_total) == ("the second", URL, 0, 9)
        assert elsewhere(here) == {}
        work(there, 1)
        await siblings.look()
        assert elsewhere(here) == {"ada": (0, 2)} and siblings.views[0].trained_step == 1
        work(here, 1)
        await siblings.look()
        assert elsewhere(here) == {"ada": (2, 2)}, "known credit is not counted twice, nor the run's own"
    there.close()


async def test_imported_credit_grows_with_the_other_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = made(tmp_path / "first", "first")
    second = made(tmp_path / "second", "second", beside=first)
    here, there = serve(first, 1), serve(second, 2)
    async with looking(first, here, 1) as siblings:
        for step in (1, 2, 3):
            work(there, step)
            monkeypatch.setattr("echo_hub.lifecycle.sibling_runs.time.time", lambda step=step: 10.0 * step)
            await siblings.look()
            assert elsewhere(here) == {"ada": (0, 2 * step)}
        work(there, 4)
        await siblings.look()
        assert elsewhere(here) == {"ada": (0, 6)}, "one second has one state"
        monkeypatch.setattr("echo_hub.lifecycle.sibling_runs.time.time", lambda: 99.0)
        await siblings.look()
        assert elsewhere(here) == {"ada": (0, 8)}, "the later state follows"
    there.close()


async def test_a_run_and_its_copy_count_once(tmp_path: Path) -> None:
    first = made(tmp_path / "first", "first")
    second = made(tmp_path / "second", "second", beside=first)
    here, there = serve(first, 1), serve(second, 2)
    work(there, 1)
    there.close()
    shutil.copytree(second.root, tmp_path / "a backup")
    newer = Store.open(second.database_url)
    work(newer, 2)
    newer.close()
    here.close()
    shutil.copytree(first.root, tmp_path / "an old first")
    async with looking(first, Store.open(first.database_url), 1) as siblings:
        await siblings.look()
        assert [view.trained_step for view in siblings.views] == [2], "a copy of this run is not another run"


async def test_a_run_that_cannot_be_read_is_left_out_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = made(tmp_path / "first", "first")
    for name in ("bad settings", "bad books", "never served"):
        made(tmp_path / name, name, beside=first)
    (tmp_path / "bad settings" / "config.toml").write_text("[run]\nnames = 1\n")
    (tmp_path / "bad books" / "echo.db").write_bytes(b"no database" * 100)
    async with looking(first, serve(first, 1), 1) as siblings:
        await siblings.look()
        await siblings.look()
        assert siblings.views == ()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [name for text in said for name in ("bad books", "bad settings", "never") if name in text] == [
        "bad books",
        "bad settings",
    ]


async def test_a_run_without_its_key_continues_without_siblings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = made(tmp_path / "first", "first")
    async with looking(first, serve(first, 1), 1) as siblings:
        first.key.rename(tmp_path / "elsewhere")
        await siblings.look()
        await siblings.look()
        assert siblings.views == ()
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
