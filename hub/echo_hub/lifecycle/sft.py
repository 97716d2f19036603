"""Fine-tune a run's initial adapter on demonstrations: `echo-hub sft`.

    RUN/sft-work/sft.json       the inputs and options
    RUN/sft-work/from/          the adapter to begin with, in PEFT layout; missing for the bare base
    RUN/sft-work/checkpoints/   the progress: `echo_hub.learner.sft`
    RUN/sft/                    the resulting adapter in PEFT layout, and sft.json with its figures

The command trains the model that the run starts with: the base, the adapter that model.start_from names, or a fork's
version. The result takes its place: model.start_from becomes RUN/sft, or the RUN/start of a fork is rewritten. Each
stage is written completely before the next one. So a crash loses only the updates since the last checkpoint, and the
same command resumes.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from echo_hub.config.file import set_in_file
from echo_hub.config.sections import HubConfig
from echo_hub.learner.settings import LearnerSettings
from echo_hub.learner.sft import Finetuning, SftProgress, SftWatcher
from echo_hub.learner.sft_plan import SftPlan, SftSettings, make_plan
from echo_hub.lifecycle.beside_hub import store_of
from echo_hub.lifecycle.forking import KEPT
from echo_hub.lifecycle.starting import adapter_to_start_from
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.demonstrations import Demonstration, Demonstrations, read_demonstrations
from echo_hub.run.directory import RunDirectory
from echo_hub.run.start import (
    CHECKPOINT,
    FINETUNED,
    AdapterOrigin,
    Start,
    Weights,
    adapter_files,
    hash_of,
    published_files,
    read_origin,
    read_start,
    read_weights,
    write_files,
    write_start,
)
from echo_hub.scoring.problems import Problems
from echo_hub.store.beginnings import LINEAGE
from echo_hub.store.database import read_meta
from echo_shared.errors import ConfigError, StorageError
from echo_shared.files.atomic import atomic_directory, disk_errors, write_private

_FROM: Final = "from"
_IDENTITY: Final = (
    *(name for name in KEPT if name != "model.start_from"),
    *("run.seed", "training.max_grad_norm", "learner.precision", "learner.base_bits"),
)
"""Settings on which the fine-tuned adapter depends, in addition to the command's options."""


class SftWork(BaseModel):
    """Content of RUN/sft-work/sft.json."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    identity: Annotated[dict[str, Any], Field(min_length=1)]
    """Everything on which the adapter depends, keyed by a readable name. Progress is resumed only if all of it is
    equal."""
    origin: AdapterOrigin = AdapterOrigin()
    placed_sha256: str = ""
    """For a fork, SHA-256 of the fine-tuned weights that are now in RUN/start, in the precision that nodes get; else
    ""."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSft:
    directory: RunDirectory
    config: HubConfig
    base_dir: Path
    codec: PromptCodec
    """Converter between texts and token ids for the run's first task."""
    found: Demonstrations
    plan: SftPlan
    options: SftSettings
    start: Weights | None
    """Weights of the adapter to begin with; None means the bare base."""
    origin: AdapterOrigin
    settings: LearnerSettings

    @property
    def work(self) -> Path:
        return work_of(self.directory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finetuned:
    adapter: Path
    began_with: Path | None
    """Directory of the adapter that fine-tuning began with; None means the bare base."""
    progress: SftProgress


def work_of(directory: RunDirectory) -> Path:
    return directory.root / "sft-work"


def result_of(directory: RunDirectory) -> Path:
    return directory.root / "sft"


def prepare(directory: RunDirectory, config: HubConfig, file: Path, options: SftSettings) -> PreparedSft:
    """Read and check all inputs without training. The caller must hold `RunDirectory.locked`.

    Raises ConfigError, LearnerError, StorageError.
    """
    _check_not_begun(directory)
    base_dir = resolve_base(config.model.base)
    problems = Problems.of_run(config, PromptCodec.of_run(config, base_dir), base_dir=base_dir, run_dir=directory.root)
    codecs = {key: task.codec for key, task in problems.tasks.items()}
    found = read_demonstrations(file, codecs, max_tokens=config.sampling.max_tokens)
    plan = make_plan(found.examples, options)
    start, origin = _begins_with(directory, config, base_dir)
    settings = LearnerSettings.of_run(config, base_dir=base_dir, stop_ids=problems.codec.stop_ids)
    alone = {"processes": 1, "hosts": 1}
    return PreparedSft(
        directory=directory,
        config=config,
        base_dir=base_dir,
        codec=problems.codec,
        found=found,
        plan=plan,
        options=options,
        start=start,
        origin=origin.model_copy(update={"demonstrations": file.name}),
        settings=settings.model_copy(
            update={
                "temperature": 1.0,
                "training": plan.training(options, config.training),
                "learner": config.learner.model_copy(update=alone),
            }
        ),
    )


def finetune(prepared: PreparedSft, *, anew: bool, watcher: SftWatcher, stop: threading.Event) -> Finetuned | None:
    """Train to the end, resuming earlier progress, and let the run start with the result. Return None if `stop` was set
    before the end.

    If there is earlier progress with other options, `anew` discards it; otherwise ConfigError is raised. Also raises
    LearnerError and StorageError.
    """
    work = prepared.work
    _open_work(prepared, anew=anew)
    began_with = work / _FROM if (work / _FROM).is_dir() else None
    training = Finetuning.open(prepared.settings, prepared.plan, work / "checkpoints", start_from=began_with)
    watcher.tell(training.progress)
    if not training.run(watcher=watcher, stop=stop):
        return None
    result = result_of(prepared.directory)
    with disk_errors("The adapter cannot be written.", prepared.directory.root), atomic_directory(result) as folder:
        training.policy.save_adapter(folder)
        origin = {"origin": prepared.origin.model_dump(mode="json")}
        text = json.dumps({**origin, **_identity(prepared), **figures(training.progress)}, indent=2)
        (folder / FINETUNED).write_text(text + "\n", encoding="utf-8")
    _make_start(prepared)
    return Finetuned(adapter=result, began_with=began_with, progress=training.progress)


def figures(progress: SftProgress) -> dict[str, Any]:
    """Return the figures for sft.json. Losses, in nats per token, are those before the first epoch and after each
    epoch."""
    return {
        "updates": progress.update,
        "training_losses": progress.training_losses,
        "heldout_losses": progress.heldout_losses,
        "heldout_perplexities": [math.exp(loss) for loss in progress.heldout_losses],
        "outliers": progress.outliers,
    }


def _check_not_begun(directory: RunDirectory) -> None:
    try:
        with store_of(directory) as store:
            has_begun = not {"fixed_settings", LINEAGE}.isdisjoint(store.read(read_meta))
    except ConfigError:  # No hub has created the database yet, so the run has not begun.
        has_begun = False
    if not has_begun:
        return
    versions = directory.adapter_versions()
    root = directory.root
    raise ConfigError(
        "This run has already begun: its start can no longer be changed.",
        got=f"{root}, which has version {versions[-1]}" if versions else f"{root}, which has trained no step",
        do=f"Fork it, and train the fork before it is served: echo-hub fork {root} NEWRUN, echo-hub sft NEWRUN FILE"
        if versions
        else "Create another run, and train it before it is served: echo-hub init NEWRUN",
    )


def _begins_with(directory: RunDirectory, config: HubConfig, base_dir: Path) -> tuple[Weights | None, AdapterOrigin]:
    """Return the weights and the origin of the adapter with which the run started before `echo-hub sft` changed
    anything."""
    work, start, reference = work_of(directory), read_start(directory), config.model.start_from
    is_own = False
    if work.is_dir():
        placed = bool(reference) and Path(reference).expanduser().resolve() == result_of(directory).resolve()
        is_own = placed if start is None else _read_work(directory).placed_sha256 == start.sha256
    if is_own:
        origin = _read_work(directory).origin
        return (read_weights(work / _FROM, config, base_dir) if (work / _FROM).is_dir() else None), origin
    if start is not None:
        weights = read_weights(directory.start / CHECKPOINT, config, base_dir)
        return weights, AdapterOrigin(source=start.source, ancestors=start.ancestors)
    if not reference:
        return None, AdapterOrigin()
    adapter_dir, ancestors = adapter_to_start_from(config)
    origin = read_origin(adapter_dir) or AdapterOrigin(source=adapter_dir.resolve().name, ancestors=ancestors)
    return read_weights(adapter_dir, config, base_dir), origin


def _identity(prepared: PreparedSft) -> dict[str, Any]:
    settings = {name: _setting(prepared.config, name) for name in _IDENTITY}
    start = prepared.start
    return {
        **prepared.options.model_dump(mode="json"),
        **settings,
        "demonstrations": _hash_of_all(prepared.found.examples),
        "starts from": "the base" if start is None else hash_of(adapter_files(start, prepared.config)),
    }


def _setting(config: HubConfig, name: str) -> Any:
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key)


def _hash_of_all(examples: tuple[Demonstration, ...]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        for array in (example.prompt_ids, example.completion_ids, example.loss_mask):
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(array.tobytes())
    return digest.hexdigest()


def _read_work(directory: RunDirectory) -> SftWork:
    path = work_of(directory) / FINETUNED
    try:
        return SftWork.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise StorageError(
            "The record of fine-tuning cannot be read.",
            got=f"{path}: {error}",
            do=f"Delete {path.parent}, and start over.",
        ) from error


def _open_work(prepared: PreparedSft, *, anew: bool) -> None:
    """Create RUN/sft-work for these inputs, or check that the existing RUN/sft-work belongs to the same inputs."""
    work, identity, placed = prepared.work, _identity(prepared), ""
    if work.is_dir():
        there = _read_work(prepared.directory)
        before, placed = there.identity, there.placed_sha256
        changed = [
            f"{name} = {identity.get(name)!r}, was {before.get(name)!r}"
            for name in {**before, **identity}
            if identity.get(name) != before.get(name)
        ]
        if not changed and not anew:
            return
        if not anew:
            raise ConfigError(
                "This run has been fine-tuned with other options or demonstrations.",
                got="; ".join(changed),
                do="Use the same to resume, or --anew to discard what was trained.",
            )
    with disk_errors("Fine-tuning cannot start.", prepared.directory.root), atomic_directory(work) as folder:
        if prepared.start is not None:
            write_files(folder / _FROM, adapter_files(prepared.start, prepared.config))
        _write_work(folder, SftWork(identity=identity, origin=prepared.origin, placed_sha256=placed))


def _make_start(prepared: PreparedSft) -> None:
    directory = prepared.directory
    start = read_start(directory)
    if start is None:
        set_in_file(directory.config, "model", "start_from", str(result_of(directory).resolve()))
    elif start.sha256 != _read_work(directory).placed_sha256:
        _replace_start(prepared, start)


def _replace_start(prepared: PreparedSft, start: Start) -> None:
    """Let a fork start with the adapter in RUN/sft, with a fresh optimizer, at the same step and problem."""
    directory, config = prepared.directory, prepared.config
    weights = read_weights(result_of(directory), config, prepared.base_dir)
    placed = _read_work(directory).model_copy(update={"placed_sha256": hash_of(published_files(weights, config))})
    # Write this before RUN/start: otherwise, after a crash in between, the fine-tuned start would look like a start
    # from elsewhere.
    _write_work(work_of(directory), placed)
    finetuned = start.model_copy(update={"demonstrations": prepared.origin.demonstrations})
    write_start(directory, config, weights, finetuned)


def _write_work(folder: Path, work: SftWork) -> None:
    write_private(folder / FINETUNED, (work.model_dump_json(indent=2) + "\n").encode())
