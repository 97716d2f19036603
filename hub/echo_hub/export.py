"""Taking a run's result out: an adapter for other programs, and how good each version is."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from echo_hub.base_model import PromptCodec, resolve_base
from echo_hub.config import HubConfig
from echo_hub.learner.process import Learner
from echo_hub.learner.settings import LearnerSettings
from echo_hub.run_directory import RunDirectory
from echo_hub.verify.problems import Problems, accuracy
from echo_shared.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Greedy accuracy on the first `num_problems` held-out problems."""

    policy_version: int
    accuracy: float
    num_problems: int


def export_adapter(directory: RunDirectory, destination: Path, *, policy_version: int | None) -> int:
    """Copies a version's PEFT directory to a new `destination`; None = the newest. Returns which it was."""
    version, source = _adapter(directory, policy_version)
    if destination.exists():
        raise ConfigError("The destination exists already.", got=str(destination), do="Name a new directory.")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}-") as temporary:
            whole = Path(temporary) / "adapter"
            shutil.copytree(source, whole)
            whole.replace(destination)
    except OSError as error:
        raise ConfigError("The adapter cannot be written.", got=str(error), do="Name another directory.") from error
    return version


async def evaluate_versions(
    config: HubConfig, directory: RunDirectory, *, policy_versions: Sequence[int] | None, num_problems: int | None
) -> list[Evaluation]:
    """Greedy accuracy of each version, 0 = base; None = base and newest. Works beside a running hub."""
    if policy_versions is None:
        newest = directory.adapter_versions()[-1:]
        policy_versions = [0, *newest]
    adapters = {version: _adapter(directory, version)[1] for version in policy_versions if version > 0}
    base_dir = resolve_base(config.model.base)
    codec = PromptCodec.load(base_dir)
    problems = Problems.of_run(config, codec, num_heldout=num_problems)
    settings = LearnerSettings.of_run(config, base_dir=base_dir, stop_ids=codec.stop_ids)
    prompts = problems.heldout_prompts()
    results = []
    # A directory of its own: the run's learner may be at work in the run's.
    with tempfile.TemporaryDirectory(prefix="echo-eval-") as temporary:
        learner = await Learner.start(settings, Path(temporary))
        try:
            for version in policy_versions:
                completions = await learner.evaluate(prompts, base=version == 0, adapter=adapters.get(version))
                results.append(
                    Evaluation(
                        policy_version=version,
                        accuracy=accuracy(problems.heldout_rewards(completions)),
                        num_problems=len(prompts),
                    )
                )
        finally:
            await learner.stop()
    return results


def _adapter(directory: RunDirectory, policy_version: int | None) -> tuple[int, Path]:
    versions = directory.adapter_versions()
    if not versions or (policy_version is not None and policy_version not in versions):
        there_are = ", ".join(map(str, versions[-10:])) or "none yet"
        raise ConfigError(
            "There is no such policy version." if versions else "This run has no policy version yet.",
            got=f"asked for {policy_version or 'the newest'}; the newest are: {there_are}",
            do="Name one of these, or serve the run until it has published one.",
        )
    version = versions[-1] if policy_version is None else policy_version
    return version, directory.adapter(version)
