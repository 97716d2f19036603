"""A GGUF file is read once; its summary is kept until the file changes. A crafted file is an error."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from echo_shared.errors import BackendError, CodecError
from echo_shared.gguf.model_file import convert_model
from echo_shared.gguf.opened_model import OpenedModel
from echo_shared.gguf.shape import read_shape
from echo_shared.gguf.summary import read_summary


def test_a_summary_follows_the_file(base: Path, base_of: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(convert_model(base, tmp_path, "f32"), path)
    first = read_summary(path)
    assert first is read_summary(path)
    assert first.sizes["blk.0.attn_q.weight"] == (128, 128)
    assert first.metadata["qwen3.block_count"] == 4
    assert not any(key.startswith("tokenizer") for key in first.metadata)
    shutil.copy(convert_model(base_of("qwen2_wide"), tmp_path, "f32"), path)
    assert read_summary(path).metadata["qwen2.embedding_length"] == 192
    path.write_bytes(b"GGUF and no more")
    with pytest.raises((ValueError, IndexError, KeyError)):
        read_summary(path)


def with_list(path: Path, content: bytes) -> Path:
    """Write a GGUF file with one list, whose item type, length and items are `content`."""
    name, arrays = b"general.list", gguf.GGUFValueType.ARRAY
    head = struct.pack("<4sIQQQ", b"GGUF", gguf.GGUF_VERSION, 0, 1, len(name))
    path.write_bytes(head + name + struct.pack("<I", arrays) + content)
    return path


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<IQ", gguf.GGUFValueType.UINT32, 5_000) + bytes(400),
        struct.pack("<IQ", gguf.GGUFValueType.ARRAY, 1) * 2_000,
        struct.pack("<IQQ", gguf.GGUFValueType.STRING, 1, 2**62) + b"text",
    ],
    ids=["a list behind the end", "lists in lists", "a text behind the end"],
)
def test_a_crafted_list_is_an_error(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(CodecError, match="cannot be read"):
        OpenedModel(with_list(tmp_path / "m.gguf", content))
    with pytest.raises(BackendError, match="GGUF file cannot be used"):
        read_shape(tmp_path)


@pytest.mark.parametrize("count", [0, 1_000_000])
def test_a_crafted_number_of_layers_is_an_error(count: int, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_block_count(count)
    writer.add_context_length(64)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_tensor("token_embd.weight", np.ones((16, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(BackendError, match=f"{count} layers"):
        read_shape(tmp_path)
