"""Converted models compute what transformers computes, for every architecture and rotary scaling that is accepted."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM

from echo_node.backends.gguf_convert import convert_model, read_shape, write_adapter
from echo_node.backends.llama_cpp_native import ContextSize, LlamaContext
from echo_shared.adapter import load_adapter
from echo_shared.errors import BackendError, StorageError

LENGTH = 150
"""Longer than the original context of the scaled rotary embeddings."""


def logits_of(gguf: Path, ids: list[int], adapter: Path | None = None) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[len(ids), vocabulary]"""
    llama = LlamaContext()
    size = ContextSize(cells=256, sequences=1, batch_tokens=8, threads=1, exact_kv=True)
    llama.open(gguf, size, gpu=False)
    llama.set_adapter(adapter)
    rows = []
    for position, token in enumerate(ids):
        one = np.array([position], np.int32)
        rows.append(llama.decode(np.array([token], np.int32), one, np.array([0]), np.array([True])).copy())
    llama.close()
    return np.concatenate(rows)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_yarn", "qwen2", "llama", "llama3_rope", "llama_linear_rope"])
@pytest.mark.parametrize("adapted", [False, True])
def test_logits_are_those_of_transformers(
    name: str,
    adapted: bool,
    base_of: Callable[[str], Path],
    make_adapter: Callable[..., Path],
    kit: Any,
    tmp_path: Path,
) -> None:
    base = base_of(name)
    adapter = gguf_adapter = None
    if adapted:
        adapter = make_adapter(base, 3, rank_pattern={"v_proj": 5}, alpha_pattern={"v_proj": 3})
        gguf_adapter = tmp_path / "adapter.gguf"
        write_adapter(load_adapter(adapter), read_shape(base), gguf_adapter)
    ids = np.random.default_rng(1).integers(0, kit.vocabulary, LENGTH).tolist()
    expected = torch.tensor(kit.reference_logits(kit.load_reference(base, adapter), ids)).log_softmax(-1).numpy()
    got = torch.tensor(logits_of(convert_model(base, tmp_path, "f32"), ids, gguf_adapter)).log_softmax(-1).numpy()
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_sharded_bfloat16_weights(base: Path, kit: Any, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="400KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    ids = list(range(20))
    expected = kit.reference_logits(kit.load_reference(tmp_path / "sharded"), ids)
    np.testing.assert_allclose(
        logits_of(convert_model(tmp_path / "sharded", tmp_path, "f32"), ids), expected, atol=1e-4
    )


def test_a_conversion_is_made_once_and_whole(base: Path, tmp_path: Path) -> None:
    made = convert_model(base, tmp_path / "derived", "q8_0")
    stamp = made.stat().st_mtime_ns
    assert convert_model(base, tmp_path / "derived", "q8_0") == made
    assert made.stat().st_mtime_ns == stamp
    assert [path.name for path in made.parent.iterdir()] == [made.name]


def copy_with(base: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(base, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


def test_configurations_from_before_transformers_5(base: Path, tmp_path: Path) -> None:
    old = copy_with(base, tmp_path / "old", rope_parameters=None, rope_theta=10_000.0, rope_scaling=None)
    assert read_shape(old) == read_shape(base)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gpt2"},
        {"hidden_act": "gelu"},
        {"use_sliding_window": True},
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
    ],
)
def test_what_llama_cpp_would_get_wrong_is_refused(changes: dict[str, Any], base: Path, tmp_path: Path) -> None:
    with pytest.raises(BackendError) as caught:
        convert_model(copy_with(base, tmp_path / "odd", **changes), tmp_path, "f32")
    assert caught.value.code == "unsupported_model"
    assert list(tmp_path.glob("*.gguf*")) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_type": "qwen3"}'])
def test_a_damaged_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BackendError):
        read_shape(tmp_path)


def test_a_disk_that_is_full_is_said_and_nothing_is_left(
    base: Path, make_adapter: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(GGUFWriter, "write_kv_data_to_file", refuse)
    with pytest.raises(StorageError, match="No space left"):
        convert_model(base, tmp_path / "derived", "f32")
    assert list((tmp_path / "derived").iterdir()) == []
    with pytest.raises(StorageError, match="No space left"):
        write_adapter(load_adapter(make_adapter(base, 3)), read_shape(base), tmp_path / "adapter.gguf")
