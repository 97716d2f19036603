"""Adapters that do not fit the model are refused before llama.cpp reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from echo_shared.delta.adapter import load_adapter
from echo_shared.errors import BackendError
from echo_shared.gguf.adapter_file import write_adapter
from echo_shared.gguf.model_file import convert_model
from echo_shared.gguf.shape import read_shape
from echo_shared.gguf.summary import read_summary
from tests.families import make_tiny


def test_an_adapter_for_other_layers_is_refused(
    base: Path, base_of: Callable[[str], Path], make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    adapter = load_adapter(make_adapter(base, 3))
    shape, sizes = read_shape(base), read_summary(convert_model(base, tmp_path, "f32")).sizes
    wide = base_of("qwen2_wide")
    wide_sizes = read_summary(convert_model(wide, tmp_path, "f32")).sizes
    with pytest.raises(BackendError, match="another shape"):
        write_adapter(adapter, read_shape(wide), wide_sizes, tmp_path / "adapter.gguf")
    for path in ("model.layers.4.self_attn.q_proj", "model.embed_tokens", "model.layers.0.mlp.experts.0.up_proj"):
        module = dataclasses.replace(adapter.modules[0], path=path)
        with pytest.raises(BackendError, match="does not have"):
            write_adapter(dataclasses.replace(adapter, modules=(module,)), shape, sizes, tmp_path / "adapter.gguf")


@pytest.mark.parametrize("layer", ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj"])
def test_layers_that_llama_cpp_computes_without_adapters(
    layer: str, base: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    """llama.cpp would load an adapter for these layers and then ignore it, so the conversion must refuse it."""
    latent = make_tiny("deepseek_v2", tmp_path / "latent")
    sizes = read_summary(convert_model(latent, tmp_path, "f32")).sizes
    adapter = load_adapter(make_adapter(base, 3))
    module = dataclasses.replace(adapter.modules[0], path=f"model.layers.0.self_attn.{layer}")
    with pytest.raises(BackendError, match="latent attention without adapters"):
        write_adapter(
            dataclasses.replace(adapter, modules=(module,)), read_shape(latent), sizes, tmp_path / "adapter.gguf"
        )
