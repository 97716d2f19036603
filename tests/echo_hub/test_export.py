"""A real adapter: trained by the real learner, exported, and evaluated beside the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from echo_hub.config.sections import HubConfig
from echo_hub.config.task_sections import EvaluationConfig, SamplingConfig
from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.export import evaluate_versions, export_adapter
from echo_hub.learner.process import Learner
from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_hub.run.base_model import PromptCodec, resolve_base
from echo_hub.run.directory import RunDirectory
from echo_shared.errors import ConfigError

CONFIG = HubConfig(
    sampling=SamplingConfig(max_tokens=6),
    evaluation=EvaluationConfig(problems=16, samples=4),
    training=TrainingConfig(lora_rank=2, learning_rate=10.0),
    learner=LearnerConfig(threads=1, device="cpu"),
)


def make_version(directory: RunDirectory, version: int) -> None:
    directory.adapter(version).mkdir(parents=True)
    (directory.adapter(version) / "adapter_config.json").write_text(f'{{"r": {version}}}')
    (directory.adapter(version) / "adapter_model.safetensors").write_bytes(bytes([version]) * 1_000)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    for version in (1, 2, 10):
        make_version(directory, version)
    return directory


def test_the_newest_version_or_the_one_asked_for(run: RunDirectory, tmp_path: Path) -> None:
    assert export_adapter(run, tmp_path / "deep" / "newest", policy_version=None) == 10
    assert contents(tmp_path / "deep" / "newest") == contents(run.adapter(10))
    assert export_adapter(run, tmp_path / "second", policy_version=2) == 2
    assert contents(tmp_path / "second") == contents(run.adapter(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "run", "second"], "nothing is left over"


def test_nothing_is_ever_overwritten(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    with pytest.raises(ConfigError, match=r"(?s)exists already.*mine.*new directory"):
        export_adapter(run, tmp_path / "mine", policy_version=None)
    assert contents(tmp_path / "mine") == {"notes": b"mine"}


def test_a_version_that_is_not_there(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)no such policy version.*asked for 3.*1, 2, 10"):
        export_adapter(run, tmp_path / "out", policy_version=3)
    with pytest.raises(ConfigError, match=r"(?s)no policy version yet.*none yet"):
        export_adapter(RunDirectory(tmp_path / "new"), tmp_path / "out", policy_version=None)
    assert not (tmp_path / "out").exists()


def test_a_destination_that_cannot_be_made(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        export_adapter(run, tmp_path / "file" / "out", policy_version=None)


@pytest.mark.slow
async def test_versions_are_evaluated_beside_the_run(tmp_path: Path) -> None:
    """One step at an absurd learning rate ruins the base's additions, so that the two versions must differ."""
    directory = RunDirectory(tmp_path / "run")
    directory.root.mkdir()
    codec = PromptCodec.load(base_dir := resolve_base("builtin:tiny"))
    ids = codec.encode_prompt("999")
    rollouts = tuple(
        TrainingRollout(
            completion_ids=ids,
            loss_mask=np.ones(len(ids), dtype=bool),
            behavior_logprobs=np.full(len(ids), -1.0, np.float32),
            reward=float(index),
            truncated=False,
        )
        for index in range(2)
    )
    group = TrainingGroup(prompt_ids=codec.encode_prompt("123+456="), rollouts=rollouts)
    settings = LearnerSettings.of_run(CONFIG, base_dir=base_dir, stop_ids=codec.stop_ids)
    learner = await Learner.start(settings, directory.root)
    try:
        await (await learner.train(1, [group], directory.adapter(1))).metrics()
        # The run's own learner is still there and holds its lock.
        found = await evaluate_versions(CONFIG, directory, policy_versions=None)
        again = await evaluate_versions(CONFIG, directory, policy_versions=[1, 0])
    finally:
        await learner.stop()
    assert [(row.policy_version, row.kind.value, row.samples) for row in found] == [
        (0, "greedy", 1),
        (0, "sampled", 4),
        (1, "greedy", 1),
        (1, "sampled", 4),
    ]
    assert {row.num_problems for row in found} == {16}
    base, base_sampled, ruined, ruined_sampled = found
    assert base.accuracy > 0.1 and base_sampled.pass_at[4] >= base_sampled.accuracy > 0
    assert ruined.accuracy == ruined_sampled.accuracy == ruined_sampled.pass_at[4] == 0.0
    by_chance = {"seconds": 0.0, "evaluated_at": 0.0}
    assert [replace(row, **by_chance) for row in again] == [
        replace(row, **by_chance) for row in (ruined, ruined_sampled, base, base_sampled)
    ], "the same versions have the same figures, in whatever order"


async def test_an_unknown_version_is_refused_before_anything_starts(run: RunDirectory) -> None:
    with pytest.raises(ConfigError, match="asked for 7"):
        await evaluate_versions(CONFIG, run, policy_versions=[0, 7])
