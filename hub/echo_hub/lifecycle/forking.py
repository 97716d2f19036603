"""Create a new run from a version of another run, with other settings: `echo-hub fork`.

The new run gets the effective settings of RUN, including changes by operators while RUN was served. It also gets
version K of RUN: the adapter and, if a checkpoint of step K exists, the learner's float32 weights and optimizer state.
Everything else is new: database, keys, address. Steps continue after K, with problems that RUN had not trained on
before step K ended.

config.toml is written last. If the command is killed earlier, the new directory contains no run yet, and the same
command starts over.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from echo_hub.config.file import load_config
from echo_hub.config.sections import HubConfig
from echo_hub.lifecycle.beside_hub import store_of
from echo_hub.lifecycle.starting import ancestors_of, check_steps, published_adapter
from echo_hub.run.base_files import resolve_base
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run, port_beside
from echo_hub.run.start import (
    ADAPTER,
    CHECKPOINT,
    RECORD,
    Start,
    adapter_files,
    hash_of,
    published_files,
    read_weights,
    write_checkpoint,
    write_files,
)
from echo_hub.store.actions import read_settings
from echo_hub.store.beginnings import first_group_behind
from echo_hub.views.live import with_stored
from echo_shared.errors import ConfigError
from echo_shared.files.atomic import atomic_directory, disk_errors

KEPT: Final = (
    *("model.base", "model.start_from", "training.lora_rank", "training.lora_alpha"),
    *("training.lora_targets", "training.rslora"),
)
"""Settings that a fork must not change, because the adapter and its optimizer state depend on them."""
OWN: Final[Mapping[str, Any]] = {"server.public_url": "", "server.swarm_port": 0, "store.url": ""}
"""Settings that two runs cannot share, such as addresses. A fork gets these default values instead of its parent's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    config: HubConfig
    start: Start
    checkpoints: tuple[int, ...]
    """Steps of the parent run that have a complete checkpoint."""


def fork(parent: RunDirectory, target: RunDirectory, *, at: int | None, changes: Sequence[str]) -> Forked:
    """Create `target` from version `at` of `parent`; None means the newest. `changes` are texts section.key=value.

    May run while a hub serves `parent`. Raises ConfigError, StorageError.
    """
    if target.config.exists():
        raise ConfigError("This directory already contains a run.", got=str(target.config), do="Name another one.")
    with store_of(parent) as store:
        before = with_stored(load_config(parent.config, {}), store.read(read_settings))
        version, checkpoints = _version(parent, at)
        first_group = first_group_behind(store.engine, version)
    config = _settings(parent, before, changes, version)
    check_steps(version, config)
    start = Start(
        kind="fork",
        policy_version=version,
        source=parent.root.resolve().name,
        sha256="",
        has_optimizer=version in checkpoints,
        first_group=first_group,
        ancestors=ancestors_of(parent, version),
    )
    start = _take(parent, target, config, start)
    make_run(target, config)
    return Forked(config=config, start=start, checkpoints=checkpoints)


def nested(changes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse section.key=value texts into settings by section. A value is TOML; invalid TOML is taken as a text. Raises
    ConfigError.
    """
    found: dict[str, dict[str, Any]] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and section and key):
            raise ConfigError(
                "A changed setting must have the form section.key=value.", got=change, do="Example: training.steps=80"
            )
        found.setdefault(section, {})[key] = value_of(value.strip())
    return found


def value_of(text: str) -> Any:
    """Parse a TOML value. Invalid TOML is returned unchanged, as a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except tomllib.TOMLDecodeError:
        return text


def _version(parent: RunDirectory, at: int | None) -> tuple[int, tuple[int, ...]]:
    """Return the version to fork, and the steps that have complete checkpoints. Raises ConfigError if the version does
    not exist.
    """
    checkpoints = tuple(step for step in _steps(parent) if _is_whole(parent.checkpoint(step)))
    there = sorted({*checkpoints, *parent.adapter_versions()} - {0})
    if not there or (at is not None and at not in there):
        raise ConfigError(
            "The run does not have this version." if there else "The run has no version yet to fork from.",
            got=f"asked for {'the newest' if at is None else at}; its newest: "
            f"{', '.join(map(str, there[-10:])) or 'none'}",
            do="Name one of these. To begin at version 0, create a new run: echo-hub init",
        )
    return there[-1] if at is None else at, checkpoints


def _steps(parent: RunDirectory) -> list[int]:
    digits = (path.name.rpartition("-")[2] for path in (parent.root / "checkpoints").glob("step-*"))
    return sorted(int(each) for each in digits if each.isdecimal())


def _is_whole(checkpoint: Path) -> bool:
    try:
        marker = json.loads((checkpoint / "checkpoint.json").read_bytes())
        return all((checkpoint / name).stat().st_size == size for name, size in marker["files"].items())
    except (OSError, ValueError, KeyError):
        return False


def _settings(parent: RunDirectory, before: HubConfig, changes: Sequence[str], version: int) -> HubConfig:
    dump: dict[str, dict[str, Any]] = before.model_dump(mode="json")
    given = nested(changes)
    for name, value in {**OWN, "server.port": port_beside(parent)}.items():
        section, _, key = name.partition(".")
        dump[section][key] = value
    dump["model"]["start_from"] = f"{parent.root.resolve()}@{version}"
    kept = {name: dump[name.partition(".")[0]][name.partition(".")[2]] for name in KEPT}
    for section, settings in given.items():
        dump.setdefault(section, {}).update(settings)
    config = load_config(None, dump)
    lost = [name for name, value in kept.items() if _get(config, name) != value]
    if lost:
        raise ConfigError(
            "A fork cannot change settings that its adapter was trained with.",
            got="; ".join(f"{name} = {_get(config, name)!r}, was {kept[name]!r}" for name in lost),
            do="Do not change them. For another base or rank, create a new run: echo-hub init",
        )
    return config


def _get(config: HubConfig, name: str) -> Any:
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key)


def _take(parent: RunDirectory, target: RunDirectory, config: HubConfig, start: Start) -> Start:
    version = start.policy_version
    base_dir = resolve_base(config.model.base)
    checkpoint = parent.checkpoint(version)
    source = checkpoint if start.has_optimizer else published_adapter(parent, version)
    weights = read_weights(source, config, base_dir)
    is_published = version in parent.adapter_versions()
    published = read_weights(parent.adapter(version), config, base_dir) if is_published else weights
    files = published_files(published, config)
    with disk_errors("The fork cannot be written.", target.root), atomic_directory(target.start) as folder:
        write_files(folder / ADAPTER, files)
        if start.has_optimizer:
            shutil.copytree(checkpoint, folder / CHECKPOINT)
        else:
            write_checkpoint(folder / CHECKPOINT, adapter_files(weights, config), step=version)
        start = start.model_copy(update={"sha256": hash_of(files)})
        (folder / RECORD).write_text(start.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return start
