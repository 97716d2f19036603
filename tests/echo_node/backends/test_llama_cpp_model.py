"""The engine loads the given GGUF file, or a conversion whose precision suits the machine."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echo_node.backends import llama_cpp_model
from echo_node.backends.llama_cpp_model import ModelFile, find_model
from echo_shared.delta.adapter import load_adapter
from echo_shared.delta.base_weights import NO_WEIGHTS
from echo_shared.errors import BackendError
from echo_shared.gguf.adapter_file import write_adapter
from echo_shared.gguf.model_file import convert_model
from echo_shared.gguf.shape import read_shape
from echo_shared.gguf.summary import read_summary
from tests.families import make_tiny
from tests.gguf_logits import logits_of


def test_without_weights_auto_takes_the_conversion_that_is_here(base: Path, tmp_path: Path) -> None:
    bare = tmp_path / base.name
    bare.mkdir()
    shutil.copy(base / "config.json", bare)
    with pytest.raises(BackendError) as caught:
        find_model(bare, tmp_path / "derived", "auto", gpu=False)
    assert caught.value.code == NO_WEIGHTS
    made = convert_model(base, tmp_path / "derived", "q8_0")
    found = find_model(bare, tmp_path / "derived", "auto", gpu=False)
    assert (found.path, found.precision, found.is_converted) == (made, "q8_0", True)
    with pytest.raises(BackendError) as caught:
        find_model(bare, tmp_path / "derived", "f16", gpu=False)
    assert caught.value.code == NO_WEIGHTS


@pytest.mark.parametrize("precision", ["f16", "bf16", "q8_0", "q4_k_m", "q5_k_m", "q6_k", "q3_k_m"])
def test_lower_precisions_compute_nearly_the_same(precision: str, base: Path, kit: Any, tmp_path: Path) -> None:
    ids = list(range(20))
    expected = torch.tensor(kit.reference_logits(kit.load_reference(base), ids)).softmax(-1).numpy()
    model = find_model(base, tmp_path, precision, gpu=False)
    assert not model.is_exact
    assert [path.name for path in tmp_path.iterdir()] == [model.path.name]
    got = torch.tensor(logits_of(model.path, ids)).softmax(-1).numpy()
    assert 0 < np.abs(got - expected).sum(axis=-1).mean() < 0.6


@pytest.mark.parametrize(
    ("features", "gpu", "expected"),
    [(b"AVX512 = 1 | AVX512_BF16 = 1", False, "bf16"), (b"AVX512 = 1", False, "f16"), (b"BF16 = 1", True, "f16")],
)
def test_the_16_bit_type_is_the_one_the_processor_multiplies(
    features: bytes, gpu: bool, expected: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "-f32-" in find_model(base, tmp_path, "auto", gpu=gpu).path.name
    monkeypatch.setattr(llama_cpp_model, "_EXACT_BYTES", 0)
    monkeypatch.setattr(llama_cpp_model.llama_cpp, "llama_print_system_info", lambda: features)
    assert f"-{expected}-" in find_model(base, tmp_path, "auto", gpu=gpu).path.name


def test_gemma_counts_as_16_bits(tmp_path: Path) -> None:
    """llama.cpp computes GELU from a table for 16-bit numbers, so the hub must not expect float32."""
    gemma = make_tiny("gemma3", tmp_path / "gemma3")
    found = find_model(gemma, tmp_path / "derived", "auto", gpu=False)
    assert (found.is_exact, found.precision) in {(False, "f16"), (False, "bf16")}
    with pytest.raises(BackendError, match="activations of this model in 16 bits"):
        find_model(gemma, tmp_path / "derived", "f32", gpu=False)
    given = tmp_path / "given"
    given.mkdir()
    shutil.copy(gemma / "config.json", given)
    shutil.copy(convert_model(gemma, tmp_path, "f32"), given / "model.gguf")
    found = find_model(given, tmp_path / "derived", "auto", gpu=False)
    assert (found.is_exact, found.precision, found.is_converted) == (True, "f16", False)


def test_a_base_given_as_gguf_is_used_unchanged(
    base: Path, make_adapter: Callable[..., Path], kit: Any, tmp_path: Path
) -> None:
    made = convert_model(base, tmp_path / "derived", "f32")
    given = tmp_path / "given"
    given.mkdir()
    shutil.copy(made, given / "model.gguf")
    assert find_model(given, tmp_path / "none", "auto", gpu=False) == ModelFile(
        path=given / "model.gguf", is_exact=True, precision="f32", is_converted=False
    )
    assert not (tmp_path / "none").exists()
    expected, shape = read_shape(base), read_shape(given)
    assert dataclasses.replace(shape, family=expected.family) == expected
    with pytest.raises(BackendError, match="in a GGUF file cannot be changed"):
        find_model(given, tmp_path, "q8_0", gpu=False)
    adapter = make_adapter(base, 3)
    write_adapter(load_adapter(adapter), shape, read_summary(made).sizes, tmp_path / "adapter.gguf")
    ids = list(range(20))
    got = logits_of(given / "model.gguf", ids, tmp_path / "adapter.gguf")
    np.testing.assert_allclose(got, kit.reference_logits(kit.load_reference(base, adapter), ids), atol=1e-3)
