"""The start of a hub. The run's first start fixes some settings for all later ones; a run whose database is gone is
refused.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.postgresql import PostgreSQL
from echo_hub.config.sections import HubConfig
from echo_hub.config.serving_sections import KeepingConfig, ServerConfig, StoreConfig
from echo_hub.config.task_sections import EvaluationConfig, SamplingConfig
from echo_hub.config.training_sections import TrainingConfig
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.serving import opening
from echo_hub.serving.opening import apart, check_unchanged, open_hub
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.database import write_meta
from echo_hub.store.keeping import Keeping
from echo_hub.store.store import Store
from echo_shared.errors import ConfigError, StorageError
from echo_shared.signing import key_file


async def test_held_out_problems_are_fixed_because_training_avoids_them(tmp_path: Path) -> None:
    store = AsyncStore(Store.open(RunDirectory(tmp_path).database_url))
    await check_unchanged(store, HubConfig(), "")
    await check_unchanged(store, HubConfig(), "")
    with pytest.raises(ConfigError, match=r"evaluation\.problems = 64, was 256"):
        await check_unchanged(store, HubConfig(evaluation=EvaluationConfig(problems=64)), "")
    await store.close()


async def test_all_completions_of_a_run_end_alike(tmp_path: Path) -> None:
    store = AsyncStore(Store.open(RunDirectory(tmp_path).database_url))
    config = HubConfig(sampling=SamplingConfig(stop=("</answer>",)))
    await check_unchanged(store, config, "")
    await check_unchanged(store, config, "")
    with pytest.raises(ConfigError, match=r"sampling\.stop = \[\], was \['</answer>'\]"):
        await check_unchanged(store, HubConfig(), "")
    await store.close()


async def test_a_setting_that_was_not_noted_down_at_first_is_fixed_from_then_on(tmp_path: Path) -> None:
    store = AsyncStore(Store.open(RunDirectory(tmp_path).database_url))
    await store.write(write_meta, "fixed_settings", json.dumps({"run.seed": 0}))
    await check_unchanged(store, HubConfig(evaluation=EvaluationConfig(problems=64)), "")
    with pytest.raises(ConfigError, match=r"evaluation\.problems = 256, was 64"):
        await check_unchanged(store, HubConfig(), "")
    await store.close()


@pytest.mark.parametrize("shape", [{"rslora": True}, {"lora_targets": "mlp"}], ids=str)
async def test_a_run_without_adapter_settings_has_a_plain_adapter(tmp_path: Path, shape: dict[str, Any]) -> None:
    store = AsyncStore(Store.open(RunDirectory(tmp_path).database_url))
    await store.write(write_meta, "fixed_settings", json.dumps({"run.seed": 0}))
    with pytest.raises(ConfigError, match=r"training\.(rslora = True, was False|lora_targets = 'mlp', was 'all')"):
        await check_unchanged(store, HubConfig(training=TrainingConfig(**shape)), "")
    await check_unchanged(store, HubConfig(), "")
    await store.close()


@pytest.mark.parametrize("left", ["checkpoints/step-000003", "adapters/v000003"])
@pytest.mark.parametrize("database", ["missing", "empty", "of another run", "elsewhere"])
async def test_a_trained_run_without_its_database_does_not_start(tmp_path: Path, left: str, database: str) -> None:
    directory = RunDirectory(tmp_path / "run")
    (directory.root / left).mkdir(parents=True)
    key_file.load_or_create(directory.key)
    file = tmp_path / "elsewhere.db" if database == "elsewhere" else directory.root / "echo.db"
    if database == "empty":
        file.touch()
    if database == "of another run":
        Store.open(directory.database_url).close()
    store = StoreConfig(url=f"sqlite:///{file}" if database == "elsewhere" else "")
    config = HubConfig(server=ServerConfig(port=0), store=store)
    before = file.read_bytes() if file.exists() else None
    with pytest.raises(StorageError) as refused:
        async with open_hub(config, directory):
            pass
    assert str(file) in refused.value.got and left in refused.value.got
    assert "from one backup" in refused.value.do and "echo-hub init OTHER_DIRECTORY" in refused.value.do
    assert (file.read_bytes() if file.exists() else None) == before, "no file was made"
    assert not directory.artefacts.exists()


async def test_a_run_that_has_not_trained_yet_begins_in_any_empty_database(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    for name in ("checkpoints/.unfinished-step-000001", "adapters/.unfinished-v000001"):
        (directory.root / name).mkdir(parents=True)
    key_file.load_or_create(directory.key)
    (directory.root / "echo.db").touch()
    async with open_hub(HubConfig(server=ServerConfig(port=0)), directory) as hub:
        run_id = hub.run_id
    (directory.root / "checkpoints" / "step-000001").mkdir()
    async with open_hub(HubConfig(server=ServerConfig(port=0)), directory) as hub:
        assert hub.run_id == run_id, "the run continues in it once it has trained"


def test_each_start_of_a_run_has_its_own_lease_ids() -> None:
    assert apart(CoordinatorSnapshot()) == CoordinatorSnapshot(), "lease ids of a new run begin at the first"
    books = CoordinatorSnapshot(next_group_id=8, next_lease_id=42)
    # Three hubs start from the same records, as runs restored from one backup do.
    lives = [apart(books) for _ in range(3)]
    begins = {life.next_lease_id for life in lives}
    assert min(begins) >= 42 and len(begins) == 3
    assert {replace(life, next_lease_id=42) for life in lives} == {books}


async def test_the_store_keeps_the_amount_in_the_settings(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.root.mkdir()
    key_file.load_or_create(directory.key)
    config = HubConfig(server=ServerConfig(port=0), keeping=KeepingConfig(share=0.25, max_bytes=1_000))
    async with open_hub(config, directory) as hub:
        assert hub._resources.store.store.keeping == Keeping(share=0.25, max_bytes=1_000)


async def test_a_starting_hub_waits_for_its_database_server(
    postgresql_server: PostgreSQL, empty_postgresql: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Database servers may start after the hub, so the hub waits; but not forever, because the address may be wrong."""
    directory = RunDirectory(tmp_path / "run")
    config = HubConfig(server=ServerConfig(port=0), store=StoreConfig(url=empty_postgresql))
    make_run(directory, config)
    waits, say_away = asyncio.Event(), opening._say_away
    loop = asyncio.get_running_loop()

    def told(said: str) -> None:
        say_away(said)
        loop.call_soon_threadsafe(waits.set)

    monkeypatch.setattr(opening, "_say_away", told)

    async def start() -> None:
        async with open_hub(config, directory) as hub:
            assert hub.run_id

    postgresql_server.stop()
    try:
        starting = asyncio.create_task(start())
        async with asyncio.timeout(60):
            await waits.wait()
    finally:
        postgresql_server.start()
    await starting
    monkeypatch.setattr(opening, "AWAY_AT_START_S", 0.0)
    postgresql_server.stop()
    try:
        with pytest.raises(StorageError, match=r"(?s)cannot be opened.*server runs"):
            await start()
    finally:
        postgresql_server.start()
