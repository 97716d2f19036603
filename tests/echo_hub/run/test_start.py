"""A run may start from an adapter. If it fits, it is used unchanged; otherwise it is converted exactly, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, load_file, save_file

from echo_hub.config.sections import HubConfig
from echo_hub.config.training_sections import TrainingConfig
from echo_hub.run.base_files import resolve_base
from echo_hub.run.directory import RunDirectory
from echo_hub.run.start import (
    CHECKPOINT,
    RECORD,
    Ancestor,
    Start,
    adapter_files,
    is_bfloat16,
    read_start,
    read_weights,
    write_checkpoint,
)
from echo_shared.delta.adapter import load_adapter
from echo_shared.delta.tensors import TensorFile
from echo_shared.errors import ConfigError, StorageError

BASE = resolve_base("builtin:tiny")
CONFIG = HubConfig(training=TrainingConfig(lora_rank=2, lora_alpha=4))
ABOUT = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "task_type": "CAUSAL_LM"}


def base_layers() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for file in BASE.glob("*.safetensors"):
        shapes |= {name: array.shape for name, array in load_file(file).items()}
    return {name.removesuffix(".weight"): shape for name, shape in shapes.items() if name.endswith("_proj.weight")}


@pytest.fixture
def weights() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found = {}
    for path, (out, into) in base_layers().items():
        found[f"base_model.model.{path}.lora_A.weight"] = rng.normal(size=(2, into)).astype(np.float32)
        found[f"base_model.model.{path}.lora_B.weight"] = rng.normal(size=(out, 2)).astype(np.float32)
    return found


def write(folder: Path, weights: dict[str, Any], **about: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**ABOUT, **about}))
    return folder


def test_a_fitting_adapter_is_used_unchanged(tmp_path: Path, weights: dict[str, Any]) -> None:
    read = read_weights(write(tmp_path / "adapter", weights), CONFIG, BASE)
    assert read.keys() == weights.keys()
    assert all((read[name] == weights[name]).all() for name in weights)


@pytest.mark.parametrize(
    ("about", "config"),
    [
        ({"lora_alpha": 3}, CONFIG),
        ({"use_rslora": True}, CONFIG),
        ({}, HubConfig(training=TrainingConfig(lora_rank=2, lora_alpha=4, rslora=True))),
    ],
)
def test_an_adapter_with_another_scaling_is_converted_exactly(
    tmp_path: Path, weights: dict[str, Any], about: dict[str, Any], config: HubConfig
) -> None:
    source = write(tmp_path / "adapter", weights, **about)
    files = adapter_files(read_weights(source, config, BASE), config)
    (tmp_path / "taken").mkdir()
    for name, content in files.items():
        (tmp_path / "taken" / name).write_bytes(content)
    for was, now in zip(load_adapter(source).modules, load_adapter(tmp_path / "taken").modules, strict=True):
        np.testing.assert_allclose(now.b @ now.a, was.b @ was.a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda w: {name: w[name][:1] if "lora_A" in name else w[name][:, :1] for name in w}, "rank that its config"),
        (lambda w: {name: a for name, a in w.items() if "up_proj" not in name}, r"(?s)lacks layers.*lacks up_proj"),
        (lambda w: {name: np.full_like(a, np.nan) for name, a in w.items()}, "not finite"),
        (lambda w: {name: np.pad(a, ((0, 0), (0, 3))) if "lora_A" in name else a for name, a in w.items()}, "not fit"),
        (lambda w: {name.replace("layers.0", "layers.7"): a for name, a in w.items()}, r"(?s)not fit.*no such layer"),
        (lambda w: {**w, "base_model.model.lm_head.weight": np.ones((2, 2), np.float32)}, "cannot adapt"),
        (lambda w: {}, "empty"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    tmp_path: Path, weights: dict[str, Any], spoil: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        read_weights(write(tmp_path / "adapter", spoil(weights)), CONFIG, BASE)


def test_another_rank_names_the_setting(tmp_path: Path, weights: dict[str, Any]) -> None:
    config = HubConfig(training=TrainingConfig(lora_rank=8))
    with pytest.raises(ConfigError, match=r"(?s)rank differs.*Set training\.lora_rank to 2"):
        read_weights(write(tmp_path / "adapter", weights), config, BASE)


def test_equal_rank_stabilised_scaling_is_used_unchanged(tmp_path: Path, weights: dict[str, Any]) -> None:
    config = HubConfig(training=TrainingConfig(lora_rank=2, lora_alpha=4, rslora=True))
    read = read_weights(write(tmp_path / "adapter", weights, use_rslora=True), config, BASE)
    assert all((read[name] == weights[name]).all() for name in weights)


@pytest.mark.parametrize("settings", [{}, {"lora_alpha": 16}, {"use_rslora": True}])
def test_an_adapters_own_name_in_its_keys_changes_nothing(
    tmp_path: Path, weights: dict[str, Any], settings: dict[str, Any]
) -> None:
    expected = read_weights(write(tmp_path / "plain", weights, **settings), CONFIG, BASE)
    named = {name.replace(".weight", ".default.weight"): weight for name, weight in weights.items()}
    found = read_weights(write(tmp_path / "named", named, **settings), CONFIG, BASE)
    assert found.keys() == expected.keys()
    assert all((found[name] == expected[name]).all() for name in expected)


def test_other_layers_name_the_setting_that_would_fit(tmp_path: Path, weights: dict[str, Any]) -> None:
    few = {name: weight for name, weight in weights.items() if ".q_proj." in name or ".v_proj." in name}
    source = write(tmp_path / "adapter", few)
    attention = HubConfig(training=TrainingConfig(lora_rank=2, lora_alpha=4, lora_targets="attention"))
    with pytest.raises(ConfigError, match=r"(?s)lacks layers.*lacks k_proj, o_proj.*lora_targets to q_proj,v_proj"):
        read_weights(source, attention, BASE)
    mlp = HubConfig(training=TrainingConfig(lora_rank=2, lora_alpha=4, lora_targets="mlp"))
    with pytest.raises(ConfigError, match=r"(?s)does not train.*q_proj, v_proj in.*lora_targets to q_proj,v_proj"):
        read_weights(source, mlp, BASE)
    fitting = HubConfig(training=TrainingConfig(lora_rank=2, lora_alpha=4, lora_targets="q_proj,v_proj"))
    assert read_weights(source, fitting, BASE).keys() == few.keys()


def test_pickles_and_rubbish_are_never_read(tmp_path: Path, weights: dict[str, Any]) -> None:
    source = write(tmp_path / "adapter", weights)
    (source / "adapter_model.safetensors").rename(source / "adapter_model.bin")
    with pytest.raises(ConfigError, match="pickled weights are never loaded"):
        read_weights(source, CONFIG, BASE)
    (source / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match="not valid safetensors"):
        read_weights(source, CONFIG, BASE)
    (source / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_weights(source, CONFIG, BASE)


def test_rounding_is_to_the_nearest_bfloat16(tmp_path: Path, weights: dict[str, Any]) -> None:
    name = next(iter(weights))
    weights[name].flat[:5] = [1.0, 1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-7), 1 + 2**-8 + 2**-20]
    (tmp_path / "rounded.safetensors").write_bytes(
        adapter_files(weights, CONFIG, rounded=True)["adapter_model.safetensors"]
    )
    read = TensorFile(tmp_path / "rounded.safetensors")
    assert list(read[name].flat[:5]) == [1.0, 1.0, 1 + 2**-6, -(1 + 2**-7), 1 + 2**-7], "ties go to the even value"
    assert not is_bfloat16(weights)
    assert is_bfloat16({one: np.array(read[one]) for one in read})


def test_a_checkpoint_is_of_the_learners_layout(tmp_path: Path, weights: dict[str, Any]) -> None:
    write_checkpoint(tmp_path / CHECKPOINT, adapter_files(weights, CONFIG), step=3)
    marker = json.loads((tmp_path / CHECKPOINT / "checkpoint.json").read_text())
    assert (marker["step"], marker["told"]) == (3, [])
    sizes = {path.name: path.stat().st_size for path in (tmp_path / CHECKPOINT).iterdir()}
    assert marker["files"] == {name: size for name, size in sizes.items() if name != "checkpoint.json"}
    assert load((tmp_path / CHECKPOINT / "optimizer.safetensors").read_bytes()) == {}


def test_the_lineage_of_a_start(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert read_start(directory) is None
    start = Start(kind="adapter", policy_version=1, source="mine", sha256="")
    assert (start.lineage, start.steps_before) == (("the adapter mine",), 1)
    parents = (Ancestor(run_name="b", run_id="id", policy_version=40), Ancestor(run_name="a", policy_version=7))
    fork = start.model_copy(update={"kind": "fork", "policy_version": 40, "ancestors": parents})
    assert fork.lineage == ("version 40 of b (id)", "version 7 of a")
    assert fork.steps_before == 0, "a fork continues its parent's schedule"
    directory.start.mkdir()
    (directory.start / RECORD).write_text(fork.model_dump_json())
    assert read_start(directory) == fork
    (directory.start / RECORD).write_text("{")
    with pytest.raises(StorageError, match=r"(?s)cannot be read.*start\.json"):
        read_start(directory)
