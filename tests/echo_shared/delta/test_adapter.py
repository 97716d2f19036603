"""An adapter saved by PEFT gives the change of each weight that PEFT computes; anything else is refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from echo_shared.delta.adapter import (
    ATTENTION,
    FEED_FORWARD,
    ON_REQUEST,
    PROJECTIONS,
    is_adaptable,
    load_adapter,
    plain_name,
)
from echo_shared.errors import CodecError


def save(directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Save a random adapter of a two-layer model; return the PEFT model."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
    )
    settings = {"r": 4, "lora_alpha": 6, "target_modules": sorted(PROJECTIONS), **options}
    with warnings.catch_warnings():
        # PEFT reads an attribute that transformers has renamed.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        model = get_peft_model(Qwen3ForCausalLM(config), LoraConfig(**settings))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter).to(dtype)
    model.save_pretrained(str(directory))
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"target_modules": ["q_proj", "down_proj"]},
        {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 3}, "alpha_pattern": {"^model.layers.0.mlp.up_proj": 9}},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16},
    ],
)
def test_updates_are_pefts(options: dict[str, Any], tmp_path: Path) -> None:
    model = save(tmp_path, **options)
    adapter = load_adapter(tmp_path)
    layers: dict[str, Any] = {
        name.removeprefix("base_model.model."): layer
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }
    assert [module.path for module in adapter.modules] == sorted(layers)
    for module in adapter.modules:
        assert module.a.dtype == module.b.dtype == np.float32
        expected = layers[module.path].get_delta_weight("default").detach().float().numpy()
        tolerance = 1e-5 if "dtype" not in options else 0.05
        np.testing.assert_allclose(module.b @ module.a, expected, rtol=tolerance, atol=tolerance)
    assert adapter.max_rank == max(layer.r["default"] for layer in layers.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"peft_type": "IA3"},
        {"use_dora": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"fan_in_fan_out": True},
        {"init_lora_weights": "pissa"},
        {"layer_replication": [[0, 1]]},
        {"some_future_option": 1},
        {"r": 5},
        {"r": 0},
        {"r": True},
        {"r": "4"},
        {"lora_alpha": -1},
        {"lora_alpha": None},
        {"lora_alpha": float("nan")},
        {"rank_pattern": {"(a+)+$": 4}},
        {"rank_pattern": ["q_proj"]},
        {"alpha_pattern": {"q_proj": 0}},
    ],
)
def test_a_configuration_that_engines_cannot_apply_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CodecError):
        load_adapter(tmp_path)


PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {f"{PREFIX}.lora_A.weight": torch.ones(4, 16)},
        {f"{PREFIX}.lora_A.weight": torch.ones(4, 16), f"{PREFIX}.lora_B.weight": torch.ones(16, 3)},
        {f"{PREFIX}.lora_A.weight": torch.ones(4), f"{PREFIX}.lora_B.weight": torch.ones(16, 4)},
        {f"{PREFIX}.lora_A.weight": torch.ones(4, 16), f"{PREFIX}.lora_B.weight": torch.full((16, 4), float("nan"))},
        {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 32)},
        {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 16)},
        {"base_model.model.model.layers.0.mlp.other_proj.lora_A.weight": torch.ones(4, 16)},
        {f"{PREFIX}.lora_magnitude_vector.weight": torch.ones(16)},
    ],
)
def test_tensors_that_are_not_plain_lora_are_refused(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save(tmp_path)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CodecError):
        load_adapter(tmp_path)


def renamed(directory: Path, rename: Callable[[str], str]) -> None:
    path = directory / "adapter_model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize("name", ["default", "my-adapter", "v2", "A", "weight", "lora_A", "0"])
def test_an_adapters_name_in_its_keys_is_ignored(name: str, tmp_path: Path) -> None:
    """PEFT omits the adapter's name from tensor keys, but other software may write it."""
    save(tmp_path)
    expected = load_adapter(tmp_path)
    renamed(tmp_path, lambda key: key.replace(".weight", f".{name}.weight"))
    found = load_adapter(tmp_path)
    assert [module.path for module in found.modules] == [module.path for module in expected.modules]
    for one, other in zip(found.modules, expected.modules, strict=True):
        assert (one.a == other.a).all() and (one.b == other.b).all()
    assert {plain_name(key) for key in load_file(tmp_path / "adapter_model.safetensors")} == {
        f"base_model.model.{module.path}.lora_{half}.weight" for module in expected.modules for half in "AB"
    }


@pytest.mark.parametrize(
    ("rename", "said"),
    [
        (lambda key: key.replace(".lora_A.", ".lora_A.other.").replace(".lora_B.", ".lora_B.default."), "several"),
        (lambda key: key.replace("lora_B.", "lora_B.default."), "several adapters"),
        (lambda key: key.replace(".weight", ".a.weight" if ".layers.0." in key else ".b.weight"), "several adapters"),
        (lambda key: key.removeprefix("base_model.model."), "are not those of PEFT"),
        (lambda key: f"module.{key}", "are not those of PEFT"),
        (lambda key: key.replace("base_model.model.", "base_model.model._orig_mod-"), "are not those of PEFT"),
        (lambda key: key.replace(".weight", ""), "are not those of PEFT"),
        (lambda key: key.replace(".weight", ".a.b.weight"), "are not those of PEFT"),
        (lambda key: key.replace("lora_A", "lora_A_default"), "are not those of PEFT"),
        (lambda key: key.replace("_proj.", "_proj.base_layer."), "are not those of PEFT"),
    ],
)
def test_keys_that_are_not_pefts_are_named_as_that(rename: Callable[[str], str], said: str, tmp_path: Path) -> None:
    save(tmp_path)
    renamed(tmp_path, rename)
    with pytest.raises(CodecError, match=said) as caught:
        load_adapter(tmp_path)
    assert "save_pretrained" in str(caught.value.do)


@pytest.mark.parametrize(
    "path",
    [
        "model.layers.0.mlp.experts.3.gate_proj",
        "model.layers.0.block_sparse_moe.input_linear",
        "model.layers.0.mlp.experts.base_layer",
    ],
)
def test_experts_and_routers_are_refused(path: str, tmp_path: Path) -> None:
    assert not is_adaptable(path)
    save(tmp_path)
    halves = {f"base_model.model.{path}.lora_{half}.weight": torch.ones(4, 4) for half in "AB"}
    save_file(halves, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CodecError, match=r"(?s)expert or a router.*shared experts only"):
        load_adapter(tmp_path)


@pytest.mark.parametrize(
    "path",
    [
        "model.layers.0.mlp.shared_expert.gate_proj",
        "model.layers.0.mlp.shared_experts.down_proj",
        "model.layers.0.linear_attn.in_proj_ba",
        "model.layers.0.self_attn.kv_a_proj_with_mqa",
        "model.layers.0.feed_forward.w1",
        "model.layers.0.shared_mlp.input_linear",
    ],
)
def test_layers_of_other_families_are_read(path: str, tmp_path: Path) -> None:
    assert is_adaptable(path)
    save(tmp_path)
    halves = {f"base_model.model.{path}.lora_{half}.weight": torch.ones(4, 4) for half in "AB"}
    save_file(halves, tmp_path / "adapter_model.safetensors")
    assert [module.path for module in load_adapter(tmp_path).modules] == [path]


def test_each_layer_belongs_to_one_group() -> None:
    assert len(ATTENTION) + len(FEED_FORWARD) + len(ON_REQUEST) == len(PROJECTIONS)


@pytest.mark.parametrize("path", ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", "q_projection"])
def test_other_layers_have_no_adapter(path: str) -> None:
    assert not is_adaptable(path)


def test_a_value_beyond_float32_after_scaling_is_refused(tmp_path: Path) -> None:
    save(tmp_path, lora_alpha=900_000)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors[f"{PREFIX}.lora_B.weight"].fill_(1e38)
    save_file(tensors, path)
    with pytest.raises(CodecError):
        load_adapter(tmp_path)


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_incomplete_directory_is_refused(missing: str, tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(CodecError):
        load_adapter(tmp_path)
    (tmp_path / missing).write_bytes(b"{")
    with pytest.raises(CodecError):
        load_adapter(tmp_path)
