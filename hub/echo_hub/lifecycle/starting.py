"""Prepare a run that does not begin with the bare base: copy the adapter named by model.start_from, once.

    model.start_from ──> RUN/start ──> RUN/adapters, RUN/checkpoints ──> the database

Each stage is written completely before the next one, so after a crash, the next start repeats at most one stage. When
RUN/start is complete, the original adapter may be deleted.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import suppress
from pathlib import Path

from echo_hub.config.file import load_config
from echo_hub.config.sections import HubConfig
from echo_hub.lifecycle.beside_hub import store_of
from echo_hub.run.directory import RunDirectory
from echo_hub.run.start import (
    ADAPTER,
    CHECKPOINT,
    AdapterOrigin,
    Ancestor,
    Start,
    read_origin,
    read_start,
    read_weights,
    write_start,
)
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.beginnings import LINEAGE, Beginning, begin_at
from echo_hub.store.database import read_meta
from echo_shared.delta.adapter import CONFIG_FILE
from echo_shared.errors import ConfigError, EchoError
from echo_shared.files.atomic import atomic_directory


async def begin(store: AsyncStore, directory: RunDirectory, config: HubConfig, base_dir: Path) -> Start | None:
    """Return the record of the adapter that the run starts with, None for the bare base model. At the first start, copy
    the adapter into the run's directory.

    Raises ConfigError if the adapter named by model.start_from cannot be used, and StorageError.
    """
    meta = await store.read(read_meta)
    if LINEAGE in meta:
        return Start.model_validate_json(meta[LINEAGE])
    if "fixed_settings" in meta:  # The run has begun with the base model.
        return None
    if config.model.start_from and not directory.start.exists():
        await asyncio.to_thread(take_start, directory, config, base_dir)
    start = await asyncio.to_thread(read_start, directory)
    if start is not None:
        check_steps(start.policy_version, config)
        await asyncio.to_thread(_place, directory, start)
        beginning = Beginning(policy_version=start.policy_version, group_id=start.first_group)
        await store.write(begin_at, beginning, start.model_dump_json(), time.time())
    return start


def take_start(directory: RunDirectory, config: HubConfig, base_dir: Path) -> Start:
    """Check the adapter that model.start_from names, and create RUN/start from it. Raises ConfigError, StorageError."""
    adapter_dir, ancestors = adapter_to_start_from(config)
    weights = read_weights(adapter_dir, config, base_dir)
    origin = read_origin(adapter_dir) or AdapterOrigin(source=adapter_dir.resolve().name, ancestors=ancestors)
    start = Start(
        kind="adapter",
        policy_version=1,
        source=origin.source,
        sha256="",
        ancestors=origin.ancestors,
        demonstrations=origin.demonstrations,
    )
    return write_start(directory, config, weights, start)


def ancestors_of(directory: RunDirectory, policy_version: int) -> tuple[Ancestor, ...]:
    """Return the ancestors of a new run that begins with this version of the run in `directory`: first that run, then
    that run's own ancestors.
    """
    run_id, before = "", read_start(directory)
    with suppress(EchoError), store_of(directory) as store:
        run_id = store.read(read_meta).get("run_id", "")
    name = load_config(directory.config, {}).run.name
    own = Ancestor(run_name=name, run_id=run_id, policy_version=policy_version)
    return (own, *(before.ancestors if before is not None else ()))


def published_adapter(directory: RunDirectory, policy_version: int) -> Path:
    """Return the directory of a run's published version. Raises ConfigError if there is no such version."""
    directory.check()
    versions = directory.adapter_versions()
    if policy_version not in versions:
        raise ConfigError(
            "The run does not have this version, or no longer keeps it.",
            got=f"version {policy_version} of {directory.root}; its newest: "
            f"{', '.join(map(str, versions[-10:])) or 'none yet'}",
            do="Name one of these.",
        )
    return directory.adapter(policy_version)


def check_steps(policy_version: int, config: HubConfig) -> None:
    """Raise ConfigError if a run that begins with this version would have no steps left to train."""
    if config.training.steps <= policy_version:
        raise ConfigError(
            "The run would end before its first step.",
            got=f"it starts with version {policy_version}, training.steps = {config.training.steps}",
            do=f"Set training.steps to {policy_version + 1} or more: it counts from version 0.",
        )


def adapter_to_start_from(config: HubConfig) -> tuple[Path, tuple[Ancestor, ...]]:
    """Return the directory of the adapter that model.start_from names, and its ancestors.

    Raises ConfigError if there is no such adapter.
    """
    reference = config.model.start_from
    path = Path(reference).expanduser()
    if (path / CONFIG_FILE).is_file():
        return path, ()
    run, _, version = reference.rpartition("@")
    if not run or not version.isdecimal() or len(version) > 15:
        raise ConfigError(
            "The adapter to start from does not exist.",
            got=f"model.start_from = {reference!r}",
            do=f"Name a directory with {CONFIG_FILE} and its weights, or a version of a run: RUN@40.",
        )
    directory, policy_version = RunDirectory(Path(run).expanduser()), int(version)
    adapter_dir = published_adapter(directory, policy_version)
    base = load_config(directory.config, {}).model.base
    if base != config.model.base:
        raise ConfigError(
            "The run to start from has another base model.",
            got=f"{base} in {directory.root}, model.base = {config.model.base!r}",
            do="Set model.base to the same model.",
        )
    return adapter_dir, ancestors_of(directory, policy_version)


def _place(directory: RunDirectory, start: Start) -> None:
    version = start.policy_version
    for source, target in (
        (directory.start / ADAPTER, directory.adapter(version)),
        (directory.start / CHECKPOINT, directory.checkpoint(version)),
    ):
        with atomic_directory(target) as folder:
            shutil.copytree(source, folder, dirs_exist_ok=True)
