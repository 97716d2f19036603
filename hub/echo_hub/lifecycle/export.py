"""Export a run's results: an adapter or a merged model for other programs, and an evaluation of its versions."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from echo_hub.config.file import load_config
from echo_hub.config.sections import HubConfig
from echo_hub.evaluation.by_hub import HeldOut, drawn_by, evaluate_sets
from echo_hub.evaluation.by_sessions import judged_by
from echo_hub.evaluation.differences import Difference, NotingShares, SolvedShares, differences
from echo_hub.evaluation.evaluator import evaluator_of
from echo_hub.evaluation.examples import AnswerExample, ChoosingExamples
from echo_hub.evaluation.work_count import WorkCount
from echo_hub.learner.settings import LearnerSettings
from echo_hub.lifecycle.cluster_of_run import open_cluster
from echo_hub.lifecycle.exported import NamedBase, adapter_of, write_card, written
from echo_hub.lifecycle.merging import Dtype, merge
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.directory import RunDirectory
from echo_hub.run.start import read_start
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.sessions.host import SessionHost
from echo_shared.records.run import Evaluation


def export_adapter(
    directory: RunDirectory, destination: Path, *, policy_version: int | None, base: str | None = None
) -> int:
    """Copy a version's PEFT directory to a new `destination`, and return the version; None means the newest version.

    The weights are those that were published and evaluated; the learner's float32 weights are in its checkpoints. A
    model card is added. The adapter's configuration names the base model, so that PEFT finds it: by its model hub id,
    or by its directory on this machine. `base` overrides that name.
    """
    version, source = adapter_of(directory, policy_version)
    with written(destination) as whole:
        shutil.copytree(source, whole, dirs_exist_ok=True)
        if directory.config.is_file():
            named = NamedBase.of(base or load_config(directory.config, {}).model.base)
            _name_base(whole / "adapter_config.json", named)
            write_card(directory, whole, version, named, kind="adapter")
    return version


def export_merged(
    directory: RunDirectory, destination: Path, *, policy_version: int | None, dtype: Dtype = "auto"
) -> int:
    """Write a version, merged into its base model, to a new `destination`. None means the newest version. Return the
    version.

    Raises ConfigError if this is impossible, for example because the base model cannot be found.
    """
    version, source = adapter_of(directory, policy_version)
    reference = load_config(directory.config, {}).model.base
    with written(destination) as whole:
        merge(resolve_base(reference), source, whole, dtype=dtype)
        write_card(directory, whole, version, NamedBase.of(reference), kind="merged")
    return version


def _name_base(path: Path, named: NamedBase) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    content |= {"base_model_name_or_path": named.name, "revision": named.revision}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


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
            adapter_of(directory, version)
    adapters = {version: directory.adapter(version) if version else None for version in policy_versions}
    return await evaluate_adapters(config, adapters, count=count)


async def evaluate_adapters(
    config: HubConfig, adapters: Mapping[int, Path | None], *, count: WorkCount | None = None
) -> EvaluatedVersions:
    """Evaluate adapters. `adapters` maps a version number, which the report shows, to the adapter's directory; the
    directory None means the bare base model. `count` is updated with the number of finished completions."""
    config.check_trains()
    base_dir = resolve_base(config.model.base)
    codec = PromptCodec.of_run(config, base_dir)
    problems = Problems.of_run(config, codec, base_dir=base_dir)
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
        sessions = None
        if problems.session_tasks:
            stack.callback(problems.close)
            sessions = await stack.enter_async_context(SessionHost.open(problems.session_tasks, config.sessions))
        judge = judged_by(scoring, sessions, problems, losses=config.sessions.losses, share=1)
        elsewhere = cluster if config.evaluation.by == "ray" else None
        evaluator = evaluator_of(settings, logs=own, cluster=elsewhere, is_patient=False, count=count)
        stack.push_async_callback(evaluator.stop)
        if count is not None:
            count.total = len(adapters) * sum(len(heldout.prompts) * (1 + heldout.samples) for heldout in sets)
        for version, adapter in adapters.items():
            generate = drawn_by(evaluator, adapter)
            watches = ChoosingExamples(version, problems, measured.examples), NotingShares(version, shares)
            measured.evaluations += await evaluate_sets(version, sets, generate=generate, judge=judge, watches=watches)
    measured.differences += differences(shares)
    return measured
