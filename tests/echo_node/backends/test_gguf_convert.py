"""A model converted to GGUF computes the logits of transformers, for every supported architecture and rotary
scaling.
"""

from __future__ import annotations

import dataclasses
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

from echo_node.backends import gguf_convert
from echo_node.backends.base import NO_WEIGHTS
from echo_node.backends.gguf_convert import convert_model, find_model, read_shape, write_adapter
from echo_node.backends.kv_layout import KvLayout
from echo_node.backends.llama_cpp_native import LlamaContext, ModelOptions
from echo_shared.delta.adapter import load_adapter
from echo_shared.errors import BackendError, StorageError

LENGTH = 150
"""Tokens of a test text: more than the original context of models with scaled rotary embeddings."""


def logits_of(gguf: Path, ids: list[int], adapter: Path | None = None) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return logits [len(ids), vocabulary]."""
    llama = LlamaContext()
    llama.open(gguf, ModelOptions(batch_tokens=8, threads=1, exact=True, num_layers=4))
    llama.reserve(KvLayout(sequences=1, cells=256, unified=True))
    llama.set_adapter(None if adapter is None else llama.load_adapter(adapter))
    rows = []
    for position, token in enumerate(ids):
        rows.append(llama.feed_rows(np.array([token], np.int32), np.array([position], np.int32)).copy())
    llama.close()
    return np.concatenate(rows)


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
    sync = gguf_convert.sync
    monkeypatch.setattr(gguf_convert, "sync", lambda path: (synced.append(path.suffix), sync(path)))
    made = convert_model(base, tmp_path / "derived", "f16")
    assert synced == [".tmp", ""] and made.exists()


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
    monkeypatch.setattr(gguf_convert, "_EXACT_BYTES", 0)
    monkeypatch.setattr(gguf_convert.llama_cpp, "llama_print_system_info", lambda: features)
    assert f"-{expected}-" in find_model(base, tmp_path, "auto", gpu=gpu).path.name


def test_a_base_given_as_gguf_is_used_unchanged(
    base: Path, make_adapter: Callable[..., Path], kit: Any, tmp_path: Path
) -> None:
    made = convert_model(base, tmp_path / "derived", "f32")
    given = tmp_path / "given"
    given.mkdir()
    shutil.copy(made, given / "model.gguf")
    assert find_model(given, tmp_path / "none", "auto", gpu=False) == gguf_convert.ModelFile(
        path=given / "model.gguf", is_exact=True, precision="f32", is_converted=False
    )
    assert not (tmp_path / "none").exists()
    expected, shape = read_shape(base), read_shape(given)
    assert dataclasses.replace(shape, rope=expected.rope, norm_eps=expected.norm_eps) == expected
    assert shape.norm_eps == pytest.approx(expected.norm_eps)
    with pytest.raises(BackendError, match="in a GGUF file cannot be changed"):
        find_model(given, tmp_path, "q8_0", gpu=False)
    adapter = make_adapter(base, 3)
    write_adapter(load_adapter(adapter), shape, tmp_path / "adapter.gguf")
    ids = list(range(20))
    got = logits_of(given / "model.gguf", ids, tmp_path / "adapter.gguf")
    np.testing.assert_allclose(got, kit.reference_logits(kit.load_reference(base, adapter), ids), atol=1e-3)


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


def test_an_adapter_for_other_layers_is_refused(
    base: Path, base_of: Callable[[str], Path], make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    adapter = load_adapter(make_adapter(base, 3))
    shape = read_shape(base)
    with pytest.raises(BackendError, match="another shape"):
        write_adapter(adapter, read_shape(base_of("qwen2_wide")), tmp_path / "adapter.gguf")
    with pytest.raises(BackendError, match="does not have"):
        write_adapter(adapter, dataclasses.replace(shape, num_layers=2), tmp_path / "adapter.gguf")
    module = dataclasses.replace(adapter.modules[0], path="model.embed_tokens")
    with pytest.raises(BackendError, match="does not have"):
        write_adapter(dataclasses.replace(adapter, modules=(module,)), shape, tmp_path / "adapter.gguf")


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

    monkeypatch.setattr(GGUFWriter, "write_kv_data_to_file", refuse)
    with pytest.raises(StorageError, match="No space left"):
        convert_model(base, tmp_path / "derived", "f32")
    assert list((tmp_path / "derived").iterdir()) == []
    with pytest.raises(StorageError, match="No space left"):
        write_adapter(load_adapter(make_adapter(base, 3)), read_shape(base), tmp_path / "adapter.gguf")
