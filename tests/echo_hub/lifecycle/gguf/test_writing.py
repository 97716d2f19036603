from __future__ import annotations

import errno
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

from echo_hub.lifecycle.gguf.vocabulary import PRE, Field, vocabulary_of
from echo_hub.lifecycle.gguf.writing import write_with_tokenizer
from echo_hub.run.base_model import PromptCodec
from tests.echo_hub.lifecycle.gguf.conftest import CHATML, byte_tokenizer

WEIGHTS = np.random.default_rng(3).normal(size=(4, 64)).astype(np.float32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a file with a quantised and a plain tensor, without a tokenizer."""
    path = tmp_path / "model.gguf"
    with closing(gguf.GGUFWriter(path, "qwen3")) as writer:
        writer.add_block_count(2)
        writer.add_tokenizer_model("none")
        quantised = gguf.quants.quantize(WEIGHTS, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor("a.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor("b.weight", WEIGHTS[0])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return path


def test_tensors_and_fields_stay_and_the_tokenizer_is_added(model: Path, write_tokenizer: Any, tmp_path: Path) -> None:
    directory = write_tokenizer(byte_tokenizer("gpt-2"), end="<|im_end|>", template=CHATML)
    vocabulary = vocabulary_of(directory, PromptCodec.load(directory))
    about = [Field(key="general.name", value="spring, version 3", type=gguf.GGUFValueType.STRING)]
    write_with_tokenizer(model, tmp_path / "whole.gguf", vocabulary, {PRE: "gpt-2"}, about=about)
    before, after = gguf.GGUFReader(model), gguf.GGUFReader(tmp_path / "whole.gguf")
    for one, other in zip(before.tensors, after.tensors, strict=True):
        assert (one.name, one.tensor_type, one.shape.tolist()) == (other.name, other.tensor_type, other.shape.tolist())
        assert np.array_equal(one.data, other.data)
    told = {name: field.contents() for name, field in after.fields.items()}
    assert told["general.architecture"] == "qwen3" and told["qwen3.block_count"] == 2
    assert told["general.name"] == "spring, version 3" and told["tokenizer.ggml.pre"] == "gpt-2"
    assert told["tokenizer.ggml.model"] == "gpt2" and told["tokenizer.chat_template"] == CHATML


def test_a_disk_without_room_is_told_before_anything_is_written(
    model: Path, write_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tokenizer(byte_tokenizer("gpt-2"), end="<|im_end|>")
    vocabulary = vocabulary_of(directory, PromptCodec.load(directory))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5))
    with pytest.raises(OSError, match="MiB needed") as raised:
        write_with_tokenizer(model, tmp_path / "whole.gguf", vocabulary, {}, about=())
    assert raised.value.errno == errno.ENOSPC and not (tmp_path / "whole.gguf").exists()
