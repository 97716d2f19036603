"""GGUF files of the tiny base model, written by the node's converter and read again."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from echo_hub.run.base_files import resolve_base
from echo_shared.delta.tensors import TensorFile
from echo_shared.errors import CodecError
from echo_shared.gguf.opened_model import OpenedModel
from tests.gguf_files import write_gguf

EMBEDDING = "token_embd.weight"


@pytest.fixture(scope="module")
def base() -> Path:
    return resolve_base("builtin:tiny")


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_1"])
def test_a_model_tells_its_weights(base: Path, tmp_path: Path, kind: str) -> None:
    found = OpenedModel(write_gguf(base, tmp_path / "m.gguf", kind))
    assert (found.weights, found.architecture, found.value("{arch}.block_count")) == (kind, "qwen3", 4)
    exact = TensorFile(base / "model.safetensors")["model.embed_tokens.weight"]
    assert found.shape(EMBEDDING) == exact.shape
    stored = gguf.GGMLQuantizationType[kind.upper()]
    expected = gguf.quants.dequantize(gguf.quants.quantize(exact, stored), stored)
    assert np.array_equal(found.rows(EMBEDDING, len(exact)), expected)
    assert np.array_equal(found.rows(EMBEDDING, 2, 5), expected[5:7])
    assert np.array_equal(found.rows_at(EMBEDDING, np.array([7, 3])), expected[[7, 3]])


def test_a_split_model_has_the_tensors_of_all_parts(base: Path, tmp_path: Path) -> None:
    whole = OpenedModel(write_gguf(base, tmp_path / "whole.gguf", "q8_0"))
    first = write_gguf(base, tmp_path / "split.gguf", "q8_0", tensors_each=20)
    for part in sorted(tmp_path.glob("split-*.gguf")):
        found = OpenedModel(part)
        assert found.parts[0] == first and len(found.parts) == 3
        assert (found.weights, found.tensors.keys()) == (whole.weights, whole.tensors.keys())
    first.unlink()
    with pytest.raises(CodecError, match="incomplete") as caught:
        OpenedModel(found.parts[1])
    assert first.name in str(caught.value.got)


def test_of_mixed_matrices_the_metadata_names_the_type(tmp_path: Path) -> None:
    """If matrices have several types, the metadata names the type. If it names none, or float32 although a matrix has
    fewer bits, the type of most bytes counts.
    """

    def weights(file_type: int | None) -> str:
        path = tmp_path / f"{file_type}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        if file_type is not None:
            writer.add_file_type(file_type)
        for name, stored in (("a", gguf.GGMLQuantizationType.Q8_0), ("b", gguf.GGMLQuantizationType.Q4_1)):
            values = np.ones((64 if name == "b" else 2, 32), np.float32)
            writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
        writer.add_tensor("norm", np.ones(32, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return OpenedModel(path).weights

    assert weights(gguf.LlamaFileType.MOSTLY_Q4_K_M) == "q4_k_m"
    assert weights(None) == weights(9_999) == weights(gguf.LlamaFileType.ALL_F32) == "q4_1"


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes(10))
    with pytest.raises(CodecError, match="cannot be read") as caught:
        OpenedModel(path)
    assert str(path) in str(caught.value.got)
