"""mlx-lm's models, computed as rows of a batch, give the results of transformers, for every architecture, precision and
kind of adapter.
"""

from __future__ import annotations

import json
import shutil
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

pytest.importorskip("mlx_lm", reason="MLX is not installed: make env")

from echo_node.backends import mlx_model
from echo_node.backends.mlx_model import MlxModel
from echo_shared.errors import BackendError


def open_model(base: Path, precision: str = "f32") -> MlxModel:
    model = MlxModel()
    model.open(base, device="cpu", precision=precision)
    return model


def prompt_of(length: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 100, length).astype(np.int32)


def last_logits(model: MlxModel, prompts: Sequence[NDArray[np.int32]]) -> NDArray[np.float32]:
    model.reserve(len(prompts), mlx_model.round_up(max(map(len, prompts))), kept_rows=0)
    for row, prompt in enumerate(model.prefill(prompts)):
        model.put(prompt, [row])
    tokens = np.array([prompt[-1] for prompt in prompts], np.int32)
    return model.step(tokens, np.array([len(prompt) - 1 for prompt in prompts], np.int32))


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3_yarn", "qwen2", "llama", "llama3_rope", "llama_linear_rope", "qwen2_wide"]
)
def test_logits_are_the_references(
    name: str, base_of: Callable[[str], Path], make_adapter: Callable[..., Path], kit: Any
) -> None:
    base = base_of(name)
    model = open_model(base)
    prompts = [prompt_of(length) for length in (1, 2, 30, 150)]
    for adapter in (None, make_adapter(base, 1)):
        model.set_policy(None if adapter is None else model.read_policy(adapter))
        logits = last_logits(model, prompts)
        reference = kit.load_reference(base, adapter)
        for row, prompt in enumerate(prompts):
            np.testing.assert_allclose(logits[row], kit.reference_logits(reference, prompt)[-1], atol=2e-4)


@pytest.mark.parametrize(("precision", "tolerance"), [("f16", 0.02), ("bf16", 0.1), ("q8_0", 0.05), ("q4_0", 0.6)])
def test_lower_precisions_stay_close(
    precision: str, tolerance: float, base: Path, make_adapter: Callable[..., Path], kit: Any
) -> None:
    adapter = make_adapter(base, 1)
    model = open_model(base, precision)
    model.set_policy(model.read_policy(adapter))
    prompt = prompt_of(20)
    reference = kit.reference_logits(kit.load_reference(base, adapter), prompt)[-1]
    error = np.abs(last_logits(model, [prompt])[0] - reference).mean()
    assert 0 < error < tolerance


def test_prompts_in_pieces_and_batches(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(base)
    prompts = [prompt_of(length, seed=length) for length in (1, 9, 40, 41, 2)]
    at_once = last_logits(model, prompts)
    monkeypatch.setattr(mlx_model, "_PREFILL_TOKENS", 16)
    np.testing.assert_allclose(last_logits(model, prompts), at_once, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 9, 257, 300])
def test_extending_a_prompt_keeps_its_computed_part(
    length: int, base_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(base_of("qwen3"))
    wholes = [np.append(prompt_of(length), prompt_of(more, seed=more)) for more in (1, 40)]
    (prompt,) = model.prefill([prompt_of(length)])
    for pieces in (2_048, 16):
        monkeypatch.setattr(mlx_model, "_PREFILL_TOKENS", pieces)
        for whole, expected in zip(wholes, model.prefill(wholes), strict=True):
            extended = model.extend(prompt, whole)
            assert extended.length == expected.length == len(whole) - 1
            for found, at_once in zip(extended.layers, expected.layers, strict=True):
                for mine, theirs in zip(found, at_once, strict=True):
                    assert mine.shape == theirs.shape
                    np.testing.assert_allclose(np.array(mine), np.array(theirs), atol=1e-4)


def test_rows_move_and_room_changes_without_a_trace(base: Path) -> None:
    model = open_model(base)
    prompts = [prompt_of(length, seed=length) for length in (5, 7, 3)]
    expected = last_logits(model, prompts)
    model.reserve(5, 512, kept_rows=3)
    model.move([2, 1], [0, 4])
    model.reserve(5, 256, kept_rows=5)
    tokens = np.array([prompts[2][-1], 0, 0, 0, prompts[1][-1]], np.int32)
    moved = model.step(tokens, np.array([2, 0, 0, 0, 6], np.int32))
    np.testing.assert_allclose(moved[[0, 4]], expected[[2, 1]], atol=1e-5)


def test_the_cache_size_for_a_token_is_known(base: Path) -> None:
    """Computed by hand: keys and values (2), 4 layers, 2 heads of 32 numbers, 4 or 2 bytes each."""
    assert open_model(base).kv_bytes_per_token == 2 * 4 * 2 * 32 * 4
    assert open_model(base, "f16").kv_bytes_per_token == 2 * 4 * 2 * 32 * 2


def test_a_freed_policy_holds_nothing(base: Path, make_adapter: Callable[..., Path]) -> None:
    policy = open_model(base).read_policy(make_adapter(base, 1))
    policy.free()
    assert policy.adapter is None


def test_small_models_are_exact_and_large_ones_fit(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    assert mlx_model._resolve(base, "auto") == "f32"
    monkeypatch.setattr(mlx_model, "_F32_MODEL_BYTES", stored)
    assert mlx_model._resolve(base, "auto") == "bf16"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(total=stored))
    assert mlx_model._resolve(base, "auto") == "q8_0"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0, "factor": 2.0}}, "dynamic"),
        ({"tie_word_embeddings": False}, "lm_head"),
        ({"num_key_value_heads": 3}, "hape"),
        ({"vocab_size": None}, "NoneType"),
    ],
)
def test_models_that_mlx_computes_wrongly_are_refused(
    change: dict[str, Any], complaint: str, base: Path, tmp_path: Path
) -> None:
    shutil.copytree(base, tmp_path / "base")
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(BackendError) as caught:
        open_model(tmp_path / "base")
    assert complaint in str(caught.value)


def test_settings_that_transformers_ignores_change_nothing(base_of: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(base_of("llama"), tmp_path / "base")
    config = tmp_path / "base" / "config.json"
    change = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    prompts = [prompt_of(30)]
    np.testing.assert_array_equal(
        last_logits(open_model(tmp_path / "base"), prompts), last_logits(open_model(base_of("llama")), prompts)
    )


def test_gguf_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(BackendError, match="safetensors"):
        open_model(tmp_path)


def test_a_device_that_is_not_here_is_refused(base: Path) -> None:
    import mlx.core as mx

    if mx.metal.is_available():
        pytest.skip("Metal is here")
    with pytest.raises(BackendError):
        MlxModel().open(base, device="gpu", precision="auto")
