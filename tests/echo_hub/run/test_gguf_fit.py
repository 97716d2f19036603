from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from echo_hub.run.base_files import resolve_base
from echo_hub.run.gguf_fit import check_fits
from echo_shared.errors import ConfigError
from echo_shared.gguf.model_file import convert_model
from echo_shared.gguf.opened_model import OpenedModel
from tests.families import make_tiny
from tests.gguf_files import write_gguf


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = tmp_path / "base"
    shutil.copytree(resolve_base("builtin:tiny"), directory)
    return directory


def changed(base: Path, name: str, **tensors: np.ndarray) -> Path:
    other = base.parent / name
    shutil.copytree(base, other)
    save_file({**load_file(base / "model.safetensors"), **tensors}, other / "model.safetensors", {"format": "pt"})
    return other


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_0"])
def test_a_file_that_was_made_from_the_base_fits(base: Path, tmp_path: Path, kind: str) -> None:
    check_fits(OpenedModel(write_gguf(base, tmp_path / "m.gguf", kind, tensors_each=20)), base)


def test_another_model_of_the_same_shape_does_not_fit(base: Path, tmp_path: Path) -> None:
    file = OpenedModel(write_gguf(base, tmp_path / "m.gguf"))
    name = "model.layers.3.mlp.down_proj.weight"
    weight = load_file(base / "model.safetensors")[name]
    other = changed(base, "other", **{name: np.random.default_rng(0).permuted(weight)})
    with pytest.raises(ConfigError, match="not the base model") as caught:
        check_fits(file, other)
    assert "blk.3.ffn_down.weight, which is off by" in str(caught.value.got) and caught.value.do


def test_another_vocabulary_does_not_fit(base: Path, tmp_path: Path) -> None:
    file = OpenedModel(write_gguf(base, tmp_path / "m.gguf"))
    name = "model.embed_tokens.weight"
    other = changed(base, "other", **{name: load_file(base / "model.safetensors")[name][:-1]})
    with pytest.raises(ConfigError) as caught:
        check_fits(file, other)
    assert "token_embd.weight of 99x128 values, and the base model of 98x128" in str(caught.value.got)


def test_another_number_of_layers_does_not_fit(base: Path, tmp_path: Path) -> None:
    file = OpenedModel(write_gguf(base, tmp_path / "m.gguf"))
    config = json.loads((base / "config.json").read_bytes())
    more = {**config, "num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    (base / "config.json").write_text(json.dumps(more))
    with pytest.raises(ConfigError) as caught:
        check_fits(file, base)
    assert "4 layers, and the base model 5" in str(caught.value.got)


@pytest.mark.parametrize("name", ["llama", "deepseek_v2_full", "phi3_longrope", "lfm2", "granite"])
def test_a_conversion_of_each_kind_of_metadata_fits(name: str, tmp_path: Path) -> None:
    made = make_tiny(name, tmp_path / "base")
    check_fits(OpenedModel(convert_model(made, tmp_path, "f32")), made)


_PLAIN = {"rope_type": "default", "rope_theta": 1e6}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("of_file", "of_base", "got"),
    [
        ({}, {"rope_parameters": {**_PLAIN, "rope_theta": 5e5}}, "rope.freq_base"),
        (
            {"rope_parameters": _YARN},
            {"rope_parameters": _PLAIN},
            "with YaRN by 4, and the base model with scaling by 1",
        ),
        (
            {"rope_parameters": _PLAIN},
            {"rope_parameters": _YARN},
            "with scaling by 1, and the base model with YaRN by 4",
        ),
        ({"rope_parameters": _LINEAR}, {"rope_parameters": _PLAIN}, "with scaling by 2, and the base"),
        ({}, {"rms_norm_eps": 1e-5}, "attention.layer_norm_rms_epsilon"),
    ],
)
def test_the_same_weights_with_another_computation_do_not_fit(
    base: Path, tmp_path: Path, of_file: dict[str, object], of_base: dict[str, object], got: str
) -> None:
    """Some publishers offer the same weights in a second file for long texts, with scaled rotary embeddings."""
    config = json.loads((base / "config.json").read_bytes())
    other = changed(base, "other")
    for directory, own in ((other, of_file), (base, of_base)):
        (directory / "config.json").write_text(json.dumps({**config, **own}))
    with pytest.raises(ConfigError, match="not the base model") as caught:
        check_fits(OpenedModel(write_gguf(other, tmp_path / "m.gguf")), base)
    assert got in str(caught.value.got)


def test_a_file_without_the_factors_of_rotary_embeddings_does_not_fit(tmp_path: Path) -> None:
    """Files of Llama 3.1 that were made before llama.cpp knew its rotary embeddings lack them."""
    made = make_tiny("llama", tmp_path / "base")
    file = OpenedModel(convert_model(made, tmp_path, "f32"))
    factors = file.tensors["rope_freqs.weight"]
    file.tensors["rope_freqs.weight"] = factors._replace(data=np.array(factors.data) + 1)
    with pytest.raises(ConfigError) as caught:
        check_fits(file, made)
    assert "other values in rope_freqs.weight" in str(caught.value.got)
    del file.tensors["rope_freqs.weight"]
    with pytest.raises(ConfigError) as caught:
        check_fits(file, made)
    assert "no tensor rope_freqs.weight" in str(caught.value.got)


def test_a_base_that_no_node_runs_with_llama_cpp_is_refused(base: Path, tmp_path: Path) -> None:
    file = OpenedModel(write_gguf(base, tmp_path / "m.gguf"))
    config = json.loads((base / "config.json").read_bytes())
    (base / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
    with pytest.raises(ConfigError, match="Nodes cannot run this base model") as caught:
        check_fits(file, base)
    assert "unheard_of" in str(caught.value.got) and caught.value.do


def test_a_file_without_a_layer_does_not_fit(base: Path, tmp_path: Path) -> None:
    file = OpenedModel(write_gguf(base, tmp_path / "m.gguf"))
    del file.tensors["blk.2.attn_q.weight"]
    with pytest.raises(ConfigError) as caught:
        check_fits(file, base)
    assert "no tensor blk.2.attn_q.weight" in str(caught.value.got)
