"""A model converted to GGUF computes the logits of transformers, for every supported architecture and rotary
scaling.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM

from echo_shared.delta.adapter import load_adapter
from echo_shared.errors import BackendError, StorageError
from echo_shared.gguf import model_file
from echo_shared.gguf.adapter_file import write_adapter
from echo_shared.gguf.model_file import convert_model
from echo_shared.gguf.shape import read_shape
from echo_shared.gguf.summary import read_summary
from tests.gguf_logits import logits_of

LENGTH = 150
"""Tokens of a test text: more than the original context of models with scaled rotary embeddings."""


@pytest.mark.parametrize("name", ["qwen3", "qwen3_yarn", "qwen2", "llama", "llama3_rope", "llama_linear_rope"])
@pytest.mark.parametrize("adapted", [False, True])
def test_logits_equal_transformers(
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
        sizes = read_summary(convert_model(base, tmp_path, "f32")).sizes
        write_adapter(load_adapter(adapter), read_shape(base), sizes, gguf_adapter)
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


@pytest.mark.parametrize("precision", ["q8_0", "q4_k_m"])
def test_leftovers_of_a_killed_conversion_are_replaced(base: Path, tmp_path: Path, precision: str) -> None:
    for name in ("base-f16-1.7.tmp", "base-q4_k_m-1.7.7.f16"):
        (tmp_path / name).write_bytes(b"half of it")
    made = convert_model(base, tmp_path, precision)
    left = {path.name for path in tmp_path.iterdir()} - {made.name}
    assert left == (set() if precision == "q4_k_m" else {"base-q4_k_m-1.7.7.f16"})


def test_a_conversion_is_flushed_to_disk_before_it_is_renamed(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync = model_file.sync
    monkeypatch.setattr(model_file, "sync", lambda path: (synced.append(path.suffix), sync(path)))
    made = convert_model(base, tmp_path / "derived", "f16")
    assert synced == [".tmp", ""] and made.exists()


def test_a_gguf_of_another_architecture_is_refused(tmp_path: Path) -> None:
    with closing(GGUFWriter(tmp_path / "model.gguf", "gpt2")) as writer:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    with pytest.raises(BackendError) as caught:
        read_shape(tmp_path)
    assert caught.value.code == "unsupported_model"
    (tmp_path / "model.gguf").write_bytes(b"GGUF and no more")
    with pytest.raises(BackendError):
        read_shape(tmp_path)


@pytest.mark.parametrize("precision", ["f32", "q4_k_m"])
def test_a_disk_without_room_is_reported_before_anything_is_written(
    precision: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(StorageError, match="MiB needed"):
        convert_model(base, tmp_path / "derived", precision)
    assert list((tmp_path / "derived").iterdir()) == []


def copy_with(base: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(base, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gpt2"},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
    ],
)
def test_models_that_llama_cpp_computes_wrongly_are_refused(
    changes: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    with pytest.raises(BackendError) as caught:
        convert_model(copy_with(base, tmp_path / "odd", **changes), tmp_path, "f32")
    assert caught.value.code == "unsupported_model"
    assert list(tmp_path.glob("*.gguf*")) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_type": "qwen3"}'])
def test_a_damaged_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BackendError):
        read_shape(tmp_path)


def test_a_disk_that_is_full_is_reported_and_nothing_is_left(
    base: Path, make_adapter: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    sizes = read_summary(convert_model(base, tmp_path, "f32")).sizes
    monkeypatch.setattr(GGUFWriter, "write_kv_data_to_file", refuse)
    with pytest.raises(StorageError, match="No space left"):
        convert_model(base, tmp_path / "derived", "f32")
    assert list((tmp_path / "derived").iterdir()) == []
    with pytest.raises(StorageError, match="No space left"):
        write_adapter(load_adapter(make_adapter(base, 3)), read_shape(base), sizes, tmp_path / "adapter.gguf")
