"""Common parts of all exports: choose the version, write the directory atomically, add the model card."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from echo_hub.config.file import load_config
from echo_hub.lifecycle.beside_hub import store_of
from echo_hub.lifecycle.model_card import CardKind, GgufCard, TrainingFacts, model_card
from echo_hub.lifecycle.reward_curve import PICTURE, picture, read_reward_curve
from echo_hub.run.base_files import BUILTIN, resolve_base
from echo_hub.run.directory import RunDirectory
from echo_hub.run.gguf_base import gguf_in
from echo_hub.run.start import read_start
from echo_hub.store.run_facts import read_facts
from echo_shared.errors import ConfigError
from echo_shared.files.atomic import sync, sync_tree


@contextlib.contextmanager
def written(destination: Path) -> Iterator[Path]:
    """Yield a directory that becomes `destination` at the end of the block, once its files are on disk: a power cut
    leaves no directory with empty files. After an error nothing is left. Raises ConfigError if `destination` exists or
    cannot be written.
    """
    if destination.exists():
        raise ConfigError("The destination exists already.", got=str(destination), do="Name a new directory.")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        _delete_leftovers(destination)
        prefix = f".{destination.name}-{os.getpid()}-"
        with tempfile.TemporaryDirectory(dir=destination.parent, prefix=prefix) as temporary:
            whole = Path(temporary) / "exported"
            whole.mkdir()
            yield whole
            sync_tree(whole)
            whole.replace(destination)
            sync(destination.parent)
    except OSError as error:
        raise ConfigError("The export cannot be written.", got=str(error), do="Name another directory.") from error


def _delete_leftovers(destination: Path) -> None:
    """Delete unfinished exports to this destination that killed processes have left. They may take three times the
    space of the model."""
    name = re.compile(rf"\.{re.escape(destination.name)}-(\d+)-\w+")
    for path in destination.parent.iterdir():
        if (found := name.fullmatch(path.name)) is not None and not psutil.pid_exists(int(found[1])):
            shutil.rmtree(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedBase:
    """The name under which an exported adapter refers to its base model."""

    name: str
    revision: str | None
    is_local: bool

    @classmethod
    def of(cls, reference: str) -> NamedBase:
        """Parse `reference`, which has the same form as the setting `model.base`."""
        directory = Path(reference).expanduser()
        if reference in BUILTIN or directory.is_dir() or gguf_in(directory):
            return cls(name=str(resolve_base(reference).resolve()), revision=None, is_local=True)
        name, _, revision = reference.partition("@")
        return cls(name=name, revision=revision or None, is_local=directory.is_absolute())


def write_card(
    directory: RunDirectory,
    whole: Path,
    policy_version: int,
    named: NamedBase,
    *,
    kind: CardKind,
    gguf: GgufCard | None = None,
) -> None:
    """Write README.md into the exported directory `whole`, and a picture of the reward if the run's database has it."""
    start = read_start(directory)
    training = _training(directory, policy_version)
    text = model_card(
        load_config(directory.config, {}),
        policy_version=policy_version,
        lineage=start.lineage if start else (),
        base_id=None if named.is_local else named.name,
        kind=kind,
        gguf=gguf,
        training=training,
    )
    if training is not None and training.has_picture:
        (whole / PICTURE).write_bytes(picture(training.curve))
    (whole / "README.md").write_text(text, encoding="utf-8")


def _training(directory: RunDirectory, policy_version: int) -> TrainingFacts | None:
    """Return what the run's database says about the training; None if no hub has served the run yet."""
    try:
        with store_of(directory) as store:
            facts = store.read(read_facts, policy_version)
            return TrainingFacts(run=facts, curve=tuple(read_reward_curve(store, policy_version)))
    except ConfigError:
        return None


def adapter_of(directory: RunDirectory, policy_version: int | None) -> tuple[int, Path]:
    """Return the number and the adapter directory of a version; None means the newest. Raises ConfigError for an
    unknown version.
    """
    versions = directory.adapter_versions()
    if not versions or (policy_version is not None and policy_version not in versions):
        there_are = ", ".join(map(str, versions[-10:])) or "none yet"
        raise ConfigError(
            "This policy version does not exist." if versions else "This run has no policy version yet.",
            got=f"asked for {policy_version or 'the newest'}; the newest are: {there_are}",
            do="Name one of these, or serve the run until it has published one.",
        )
    version = versions[-1] if policy_version is None else policy_version
    return version, directory.adapter(version)
