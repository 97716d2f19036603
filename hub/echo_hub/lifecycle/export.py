"""Export a run's results: an adapter or a merged model for other programs, and an evaluation of its versions."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from echo_hub.config.file import load_config
from echo_hub.config.sections import HubConfig
from echo_hub.evaluation.by_hub import HeldOut, drawn_by, evaluate_sets, scored_by
from echo_hub.evaluation.differences import Difference, SolvedShares, differences, noting_shares
from echo_hub.evaluation.evaluator import evaluator_of
from echo_hub.evaluation.examples import AnswerExample, choosing
from echo_hub.evaluation.work_count import WorkCount
from echo_hub.learner.settings import LearnerSettings
from echo_hub.lifecycle.beside_hub import store_of
from echo_hub.lifecycle.cluster_of_run import open_cluster
from echo_hub.lifecycle.merging import Dtype, merge
from echo_hub.lifecycle.model_card import model_card
from echo_hub.run.base_model import BUILTIN, PromptCodec, resolve_base
from echo_hub.run.directory import RunDirectory
from echo_hub.run.start import read_start
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.store.run_facts import RunFacts, read_facts
from echo_shared.errors import ConfigError
from echo_shared.records.run import Evaluation


def export_adapter(
    directory: RunDirectory, destination: Path, *, policy_version: int | None, base: str | None = None
) -> int:
    """Copy a version's PEFT directory to a new `destination`, and return the version; None means the newest version.

    The weights are those that were published and evaluated; the learner's float32 weights are in its checkpoints. A
    model card is added. So that PEFT finds the base model, the adapter's configuration names it: by its model hub id,
    or by its directory on this machine. `base` overrides that name.
    """
    version, source = _adapter(directory, policy_version)
    with _written(destination) as whole:
        shutil.copytree(source, whole, dirs_exist_ok=True)
        if directory.config.is_file():
            named = _NamedBase.of(base or load_config(directory.config, {}).model.base)
            _name_base(whole / "adapter_config.json", named)
            _write_card(directory, whole, version, named, is_merged=False)
    return version


def export_merged(
    directory: RunDirectory, destination: Path, *, policy_version: int | None, dtype: Dtype = "auto"
) -> int:
    """Write a version, merged into its base model, to a new `destination`; None means the newest. Returns the version.

    Raises ConfigError, also if the base model cannot be found.
    """
    version, source = _adapter(directory, policy_version)
    reference = load_config(directory.config, {}).model.base
    with _written(destination) as whole:
        merge(resolve_base(reference), source, whole, dtype=dtype)
        _write_card(directory, whole, version, _NamedBase.of(reference), is_merged=True)
    return version


@contextlib.contextmanager
def _written(destination: Path) -> Iterator[Path]:
    """Yield a directory that becomes `destination` at the end of the block; after an error nothing is left. Raises
    ConfigError if `destination` exists or cannot be written.
    """
    if destination.exists():
        raise ConfigError("The destination exists already.", got=str(destination), do="Name a new directory.")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}-") as temporary:
            whole = Path(temporary) / "exported"
            whole.mkdir()
            yield whole
            whole.replace(destination)
    except OSError as error:
        raise ConfigError("The export cannot be written.", got=str(error), do="Name another directory.") from error


@dataclass(slots=True, kw_only=True)
class EvaluatedVersions:
    """Results of the evaluated versions."""

    evaluations: list[Evaluation] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    """Comparison of the last version with the first; empty if there is only one version."""
    examples: list[AnswerExample] = field(default_factory=list)
    """A few greedy answers of each version."""


async def evaluate_versions(
    config: HubConfig, directory: RunDirectory, *, policy_versions: Sequence[int] | None, count: WorkCount | None = None
) -> EvaluatedVersions:
    """Evaluate versions (0 = base model) on this machine. None means the base, the run's initial version and the
    newest.

    May run while a hub serves the run. `count` is updated with the number of finished completions.
    """
    if policy_versions is None:
        start = read_start(directory)
        began_with = [start.policy_version] if start else []
        there = directory.adapter_versions()
        policy_versions = sorted({0, *(version for version in began_with if version in there), *there[-1:]})
    for version in policy_versions:
        if version > 0:
            _adapter(directory, version)
    adapters = {version: directory.adapter(version) if version else None for version in policy_versions}
    return await evaluate_adapters(config, adapters, count=count)


async def evaluate_adapters(
    config: HubConfig, adapters: Mapping[int, Path | None], *, count: WorkCount | None = None
) -> EvaluatedVersions:
    """Evaluate adapters. `adapters` maps a version number, which the report shows, to a directory; None means the bare
    base model. `count` is updated with the number of finished completions.
    """
    base_dir = resolve_base(config.model.base)
    codec = PromptCodec.of_run(config, base_dir)
    problems = Problems.of_run(config, codec)
    sets = HeldOut.of_run(config, problems, stop_ids=codec.stop_ids)
    settings = LearnerSettings.of_run(
        config, base_dir=base_dir, stop_ids=codec.stop_ids, multi_turn=problems.multi_turn
    )
    measured, shares = EvaluatedVersions(), list[SolvedShares]()
    async with contextlib.AsyncExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="echo-eval-")))
        cluster = await stack.enter_async_context(
            open_cluster(config, base_dir, logs=own, kinds=("scorer", "evaluator"))
        )
        scoring = await stack.enter_async_context(
            ScoringPool.open(config, problems, base_dir=base_dir, logs=own, cluster=cluster)
        )
        elsewhere = cluster if config.evaluation.by == "ray" else None
        evaluator = evaluator_of(settings, logs=own, cluster=elsewhere, is_patient=False, count=count)
        stack.push_async_callback(evaluator.stop)
        if count is not None:
            count.total = len(adapters) * sum(len(heldout.prompts) * (1 + heldout.samples) for heldout in sets)
        for version, adapter in adapters.items():
            generate = drawn_by(evaluator, adapter)
            watches = choosing(version, problems, measured.examples), noting_shares(version, shares)
            measured.evaluations += await evaluate_sets(
                version, sets, generate=generate, judge=scored_by(scoring), watches=watches
            )
    measured.differences += differences(shares)
    return measured


@dataclass(frozen=True, slots=True, kw_only=True)
class _NamedBase:
    """How an exported adapter names its base model."""

    name: str
    revision: str | None
    is_local: bool

    @classmethod
    def of(cls, reference: str) -> _NamedBase:
        """Read `reference` in the same way as the setting `model.base`."""
        directory = Path(reference).expanduser()
        if reference in BUILTIN or directory.is_dir():
            return cls(name=str(resolve_base(reference).resolve()), revision=None, is_local=True)
        name, _, revision = reference.partition("@")
        return cls(name=name, revision=revision or None, is_local=directory.is_absolute())


def _name_base(path: Path, named: _NamedBase) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    content |= {"base_model_name_or_path": named.name, "revision": named.revision}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_card(
    directory: RunDirectory, whole: Path, policy_version: int, named: _NamedBase, *, is_merged: bool
) -> None:
    start = read_start(directory)
    text = model_card(
        load_config(directory.config, {}),
        policy_version=policy_version,
        lineage=start.lineage if start else (),
        base_id=None if named.is_local else named.name,
        is_merged=is_merged,
        facts=_facts(directory, policy_version),
    )
    (whole / "README.md").write_text(text, encoding="utf-8")


def _facts(directory: RunDirectory, policy_version: int) -> RunFacts | None:
    """Return what the run's database says about the training; None if no hub has served the run yet."""
    try:
        with store_of(directory) as store:
            return store.read(read_facts, policy_version)
    except ConfigError:
        return None


def _adapter(directory: RunDirectory, policy_version: int | None) -> tuple[int, Path]:
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
