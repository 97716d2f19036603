"""A base model with tensors that llama.cpp has no place for is refused before a file is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from echo_shared.errors import BackendError
from echo_shared.gguf.model_file import convert_model
from tests.families import make_tiny

Tensors = dict[str, NDArray[np.float32]]


def changed(name: str, directory: Path, change: Callable[[Tensors], None]) -> Path:
    """Return the tiny model of this family, after `change` has changed its tensors."""
    base = make_tiny(name, directory / name)
    tensors = load_file(base / "model.safetensors")
    change(tensors)
    save_file(tensors, base / "model.safetensors")
    return base


def with_a_bias(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.o_proj.bias"] = np.zeros(64, np.float32)


def with_a_stranger(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.gate_score"] = np.zeros(64, np.float32)


@pytest.mark.parametrize(
    ("change", "sentence"), [(with_a_bias, "a bias of o_proj"), (with_a_stranger, "a tensor named")]
)
def test_tensors_without_a_place_are_refused(change: Callable[[Tensors], None], sentence: str, tmp_path: Path) -> None:
    base = changed("qwen3", tmp_path, change)
    with pytest.raises(BackendError, match=sentence) as caught:
        convert_model(base, tmp_path, "f32")
    assert caught.value.code == "unsupported_model"
    assert list(tmp_path.glob("*.gguf*")) == []


def test_missing_experts_are_reported(tmp_path: Path) -> None:
    base = changed("qwen3_moe", tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.experts.2.up_proj.weight"))
    with pytest.raises(BackendError, match="lacks some of its experts"):
        convert_model(base, tmp_path, "f32")


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("qwen3_next", ("ffn_gate_inp.weight", "ssm_conv1d.weight", "ssm_a", "ssm_dt.bias", "attn_norm.weight")),
        ("lfm2", ("shortconv.conv.weight", "attn_q_norm.weight")),
        ("granitemoehybrid", ("ssm_a", "ssm_d", "ssm_norm.weight", "ssm_conv1d.bias")),
        ("gpt_oss_plain", ("ffn_gate_exps.bias", "attn_sinks.weight", "ffn_gate_inp.weight")),
    ],
)
def test_small_tensors_stay_in_float32(name: str, exact: tuple[str, ...], tmp_path: Path) -> None:
    """The file keeps these tensors in float32 at every precision, because llama.cpp cannot compute with them in another
    one.
    """
    made = convert_model(make_tiny(name, tmp_path / name), tmp_path, "q8_0")
    kinds = {tensor.name: tensor.tensor_type for tensor in GGUFReader(made).tensors}
    for end in exact:
        found = [kind for tensor, kind in kinds.items() if tensor.endswith(end)]
        assert found and set(found) == {GGMLQuantizationType.F32}, end
    assert kinds["token_embd.weight"] == GGMLQuantizationType.Q8_0


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_layers_that_predict_several_tokens_are_left_out(name: str, tmp_path: Path) -> None:
    def with_more(tensors: Tensors) -> None:
        tensors["mtp.fc.weight"] = tensors["mtp.layers.0.mlp.gate.bias"] = np.zeros((4, 4), np.float32)

    made = convert_model(changed(name, tmp_path, with_more), tmp_path, "f32")
    assert made.read_bytes() == convert_model(make_tiny(name, tmp_path / "as_is"), tmp_path, "f32").read_bytes()


def test_a_layers_experts_become_one_tensor(tmp_path: Path) -> None:
    base = make_tiny("qwen3_moe", tmp_path / "qwen3_moe")
    tensors = load_file(base / "model.safetensors")
    (made,) = [
        tensor
        for tensor in GGUFReader(convert_model(base, tmp_path, "f32")).tensors
        if tensor.name == "blk.1.ffn_up_exps.weight"
    ]
    experts = [tensors[f"model.layers.1.mlp.experts.{number}.up_proj.weight"] for number in range(4)]
    np.testing.assert_array_equal(made.data, np.stack(experts))
