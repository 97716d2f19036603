"""The adapter that a run starts from must get into the run's directory and store, even if the start is interrupted
anywhere."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_hub.config.file import load_config
from echo_hub.config.sections import HubConfig
from echo_hub.lifecycle import starting
from echo_hub.run import start as run_start
from echo_hub.run.backup import read_backup, write_backup
from echo_hub.run.base_files import resolve_base
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.run.start import ADAPTER, adapter_files, read_start
from echo_hub.serving.opening import check_unchanged
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.store import Store
from echo_hub.store.unfinished import read_snapshot
from echo_shared.errors import ConfigError, StorageError
from tests.echo_hub.run.test_start import base_layers

BASE = resolve_base("builtin:tiny")
SMALL: dict[str, dict[str, Any]] = {"training": {"lora_rank": 2, "lora_alpha": 4, "steps": 9}}


def adapter_of(config: HubConfig, folder: Path, *, seed: int = 0) -> Path:
    rng, weights = np.random.default_rng(seed), {}
    for path, (out, into) in base_layers().items():
        weights[f"base_model.model.{path}.lora_A.weight"] = rng.normal(size=(2, into)).astype(np.float32)
        weights[f"base_model.model.{path}.lora_B.weight"] = rng.normal(size=(out, 2)).astype(np.float32)
    folder.mkdir(parents=True)
    for name, content in adapter_files(weights, config).items():
        (folder / name).write_bytes(content)
    return folder


def made(root: Path, **settings: dict[str, Any]) -> tuple[RunDirectory, HubConfig]:
    directory = RunDirectory(root)
    make_run(directory, load_config(None, {**SMALL, **settings}))
    return directory, load_config(directory.config, {})


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return adapter_of(load_config(None, SMALL), tmp_path / "mine")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[AsyncStore]:
    (tmp_path / "run").mkdir()
    opened = AsyncStore(Store.open(RunDirectory(tmp_path / "run").database_url))
    yield opened
    await opened.close()


async def test_an_adapter_is_version_one_of_the_run(tmp_path: Path, adapter: Path, store: AsyncStore) -> None:
    directory, config = made(tmp_path / "run", model={"start_from": str(adapter)})
    start = await starting.begin(store, directory, config, BASE)
    assert start is not None and (start.policy_version, start.source) == (1, "mine")
    await check_unchanged(store, config, "")
    snapshot = await store.read(read_snapshot)
    assert (snapshot.trained_steps, snapshot.published_version, snapshot.next_group_id) == (1, 1, 0)
    assert [version.policy_version for version in store.store.versions_history(5)] == [1]
    given = (adapter / "adapter_model.safetensors").read_bytes()
    assert (directory.adapter(1) / "adapter_model.safetensors").read_bytes() == given
    assert (directory.checkpoint(1) / "adapter_model.safetensors").read_bytes() == given
    shutil.rmtree(adapter)
    assert await starting.begin(store, directory, config, BASE) == start, "the original directory is not needed again"


@pytest.mark.parametrize("killed_in", ["take_start", "_place", "begin_at"])
async def test_a_kill_in_between_costs_nothing(
    tmp_path: Path, adapter: Path, store: AsyncStore, killed_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, config = made(tmp_path / "run", model={"start_from": str(adapter)})

    def kill(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(starting, killed_in, kill)
        with pytest.raises(KeyboardInterrupt):
            await starting.begin(store, directory, config, BASE)
    assert (await store.read(read_snapshot)).trained_steps == 0
    assert directory.trained(started_with=1) == [], "no file looks as if the run had trained"
    assert await starting.begin(store, directory, config, BASE) is not None
    assert (await store.read(read_snapshot)).trained_steps == 1


async def test_an_unusable_start_can_be_replaced(tmp_path: Path, store: AsyncStore) -> None:
    directory, config = made(tmp_path / "run", model={"start_from": str(tmp_path / "nowhere")})
    with pytest.raises(ConfigError, match="adapter to start from does not exist"):
        await starting.begin(store, directory, config, BASE)
    config = config.model_copy(update={"model": config.model.model_copy(update={"start_from": ""})})
    assert await starting.begin(store, directory, config, BASE) is None
    await check_unchanged(store, config, "")


async def test_a_started_run_keeps_its_start(tmp_path: Path, adapter: Path, store: AsyncStore) -> None:
    directory, config = made(tmp_path / "run")
    assert await starting.begin(store, directory, config, BASE) is None
    await check_unchanged(store, config, "")
    other = config.model_copy(update={"model": config.model.model_copy(update={"start_from": str(adapter)})})
    assert await starting.begin(store, directory, other, BASE) is None
    with pytest.raises(ConfigError, match=r"model\.start_from = "):
        await check_unchanged(store, other, "")


async def test_a_version_of_another_run(tmp_path: Path, store: AsyncStore) -> None:
    parent, config = made(tmp_path / "parent")
    adapter_of(config, parent.adapter(12))
    directory, config = made(tmp_path / "run", model={"start_from": f"{parent.root}@12"})
    start = await starting.begin(store, directory, config, BASE)
    assert start is not None and start.lineage == ("version 12 of echo",), "its books are not there"
    for reference, said in (
        (f"{parent.root}@3", "does not have this version"),
        (f"{tmp_path}@3", "not a run directory"),
    ):
        bad = config.model_copy(update={"model": config.model.model_copy(update={"start_from": reference})})
        with pytest.raises(ConfigError, match=said):
            starting.take_start(RunDirectory(tmp_path / "other"), bad, BASE)


async def test_another_base_or_no_steps_left(tmp_path: Path, store: AsyncStore) -> None:
    parent, config = made(tmp_path / "parent", model={"base": "somebody/else"})
    adapter_of(config, parent.adapter(1))
    directory, config = made(tmp_path / "run", model={"start_from": f"{parent.root}@1"})
    with pytest.raises(ConfigError, match="another base model"):
        starting.take_start(directory, config, BASE)
    with pytest.raises(ConfigError, match=r"training\.steps to 10"):
        starting.check_steps(9, config)


async def test_a_backup_takes_the_beginning_along(tmp_path: Path, adapter: Path, store: AsyncStore) -> None:
    directory, config = made(tmp_path / "run", model={"start_from": str(adapter)})
    start = await starting.begin(store, directory, config, BASE)
    written = write_backup(directory, directory.root / "echo.db", tmp_path / "backup.tar")
    assert written.trained_step == 1
    read_backup(tmp_path / "backup.tar", tmp_path / "again")
    again = RunDirectory(tmp_path / "again")
    assert read_start(again) == start
    assert (again.start / ADAPTER / "adapter_model.safetensors").is_file()
    assert again.adapter_versions() == [1] and again.checkpoint(1).is_dir()
    with closing(sqlite3.connect(again.root / "echo.db")) as database:
        assert database.execute("SELECT policy_version FROM versions").fetchall() == [(1,)]


def test_a_full_disk_is_reported(tmp_path: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, config = made(tmp_path / "run", model={"start_from": str(adapter)})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_start, "write_files", full)
    with pytest.raises(StorageError, match="disk is full"):
        starting.take_start(directory, config, BASE)
    assert not directory.start.exists()
