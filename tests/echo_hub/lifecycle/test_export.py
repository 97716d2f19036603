"""A real adapter is trained by the real learner, exported, and evaluated while its run continues."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from echo_hub.config.sections import HubConfig, ModelConfig
from echo_hub.config.task_sections import EvaluationConfig, SamplingConfig
from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.learner.process import Learner
from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_hub.lifecycle import exported
from echo_hub.lifecycle.export import evaluate_versions, export_adapter
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_shared.errors import ConfigError
from echo_shared.files import atomic
from echo_shared.wire.messages import FinishReason

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


def test_the_newest_or_the_requested_version_is_exported(run: RunDirectory, tmp_path: Path) -> None:
    assert export_adapter(run, tmp_path / "deep" / "newest", policy_version=None) == 10
    assert contents(tmp_path / "deep" / "newest") == contents(run.adapter(10))
    assert export_adapter(run, tmp_path / "second", policy_version=2) == 2
    assert contents(tmp_path / "second") == contents(run.adapter(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "run", "second"], "nothing is left over"


def test_an_export_is_on_disk_before_it_has_its_name(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(atomic, "sync", lambda path: synced.append(f"{path.name} {(tmp_path / 'out').exists()}"))
    monkeypatch.setattr(exported, "sync", lambda path: synced.append(path.name))
    export_adapter(run, tmp_path / "out", policy_version=2)
    files = sorted(f"{path.name} False" for path in (tmp_path / "out").iterdir())
    assert sorted(synced[:-2]) == files and synced[-2:] == ["exported False", tmp_path.name]


def test_what_killed_exports_have_left_is_deleted(run: RunDirectory, tmp_path: Path) -> None:
    dead = 2**31 - 1
    left, running, other = (tmp_path / name for name in (f".out-{dead}-ab_1", f".out-{os.getpid()}-x", f".o-{dead}-x"))
    for path in (left, running, other):
        (path / "exported").mkdir(parents=True)
    export_adapter(run, tmp_path / "out", policy_version=2)
    assert not left.exists() and running.exists() and other.exists()


def test_nothing_is_ever_overwritten(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    with pytest.raises(ConfigError, match=r"(?s)exists already.*mine.*new directory"):
        export_adapter(run, tmp_path / "mine", policy_version=None)
    assert contents(tmp_path / "mine") == {"notes": b"mine"}


def test_a_missing_version_is_refused(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)policy version does not exist.*asked for 3.*1, 2, 10"):
        export_adapter(run, tmp_path / "out", policy_version=3)
    with pytest.raises(ConfigError, match=r"(?s)no policy version yet.*none yet"):
        export_adapter(RunDirectory(tmp_path / "new"), tmp_path / "out", policy_version=None)
    assert not (tmp_path / "out").exists()


def test_a_destination_that_cannot_be_made(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        export_adapter(run, tmp_path / "file" / "out", policy_version=None)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_exported_adapter_finds_its_base_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs may name their base by a relative path, but PEFT must load the exported adapter from any working directory,
    as the README in the export says.
    """
    from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    shutil.copytree(resolve_base("builtin:tiny"), tmp_path / "base")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
        LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False),
    )
    model.peft_config["default"].base_model_name_or_path = "base"
    directory = RunDirectory(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    make_run(directory, HubConfig(model=ModelConfig(base="base")))
    model.save_pretrained(directory.adapter(1))
    export_adapter(directory, tmp_path / "out", policy_version=1)
    published = json.loads((directory.adapter(1) / "adapter_config.json").read_text())
    assert published["base_model_name_or_path"] == "base", "nodes get no path of this machine"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    with loaded.disable_adapter():
        assert not torch.equal(loaded(ids).logits, model(ids).logits)
    assert "AutoPeftModelForCausalLM" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("base", "given", "named", "revision"),
    [
        ("owner/name", None, "owner/name", None),
        ("owner/name@abc", None, "owner/name", "abc"),
        ("builtin:tiny", "owner/name@main", "owner/name", "main"),
        ("builtin:tiny", None, str(resolve_base("builtin:tiny")), None),
    ],
)
def test_an_exported_adapter_names_its_base_for_peft(
    run: RunDirectory, tmp_path: Path, base: str, given: str | None, named: str, revision: str | None
) -> None:
    make_run(run, HubConfig(model=ModelConfig(base=base)))
    export_adapter(run, tmp_path / "out", policy_version=2, base=given)
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (written["base_model_name_or_path"], written["revision"]) == (named, revision)
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == bytes([2]) * 1_000
    assert ('base_model: "owner/name"' in (tmp_path / "out" / "README.md").read_text()) is (named == "owner/name")


@pytest.mark.slow
async def test_versions_are_evaluated_while_the_run_continues(tmp_path: Path) -> None:
    """Train one step at an absurd learning rate. The base model adds numbers well, and the trained version does not, so
    the accuracy shows which of them was evaluated.
    """
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
            finish_reason=FinishReason.STOP,
            sampling_s=0.0,
        )
        for index in range(2)
    )
    group = TrainingGroup(prompt_ids=codec.encode_prompt("123+456="), rollouts=rollouts)
    settings = LearnerSettings.of_run(CONFIG, base_dir=base_dir, stop_ids=codec.stop_ids)
    learner = await Learner.start(settings, directory.root)
    try:
        await (await learner.train(1, [group], directory.adapter(1))).metrics()
        # This works although the run's own learner holds the lock.
        found = (await evaluate_versions(CONFIG, directory, policy_versions=None)).evaluations
        again = (await evaluate_versions(CONFIG, directory, policy_versions=[1, 0])).evaluations
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
    ], "the same versions have the same figures in any order"


async def test_an_unknown_version_is_refused_before_anything_starts(run: RunDirectory) -> None:
    with pytest.raises(ConfigError, match="asked for 7"):
        await evaluate_versions(CONFIG, run, policy_versions=[0, 7])
