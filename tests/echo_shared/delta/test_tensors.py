"""Safetensors files of the libraries safetensors and torch are read and written unchanged; damaged ones are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from echo_shared.delta.tensors import TensorFile
from echo_shared.errors import CodecError


def test_written_tensors_are_read_unchanged(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "single": torch.randn(3, 5),
        "half": torch.randn(7).half(),
        "brain": torch.randn(2, 3, 4).bfloat16(),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(1.5),
    }
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    file = TensorFile(tmp_path / "a.safetensors")
    assert set(file) == set(tensors)
    for name, tensor in tensors.items():
        assert file.shape(name) == tuple(tensor.shape)
        assert file[name].dtype == np.float32
        np.testing.assert_array_equal(file[name], tensor.float().numpy())


def write(path: Path, header: Any, data: bytes = b"\0" * 8) -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "entry",
    [
        {**ENTRY, "dtype": "F64"},
        {**ENTRY, "dtype": ["F32"]},
        {**ENTRY, "shape": [3]},
        {**ENTRY, "shape": [-2]},
        {**ENTRY, "shape": [2.0]},
        {**ENTRY, "shape": 2},
        {**ENTRY, "data_offsets": [0, 9]},
        {**ENTRY, "data_offsets": [8, 16], "shape": [2]},
        {**ENTRY, "data_offsets": [8, 0]},
        {**ENTRY, "data_offsets": [0]},
        {"dtype": "F32"},
        [],
        None,
    ],
)
def test_an_entry_that_does_not_fit_is_refused(entry: Any, tmp_path: Path) -> None:
    assert TensorFile(write(tmp_path / "good", {"x": ENTRY}))["x"].tolist() == [0.0, 0.0]
    with pytest.raises(CodecError):
        TensorFile(write(tmp_path / "bad", {"x": entry}))


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 64, struct.pack("<Q", 5) + b"[]   ", b"\0" * 8])
def test_a_file_of_something_else_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(CodecError):
        TensorFile(tmp_path / "x")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 400), flips=st.lists(st.tuples(st.integers(0, 399), st.integers(0, 255)), max_size=4))
def test_damage_gives_numbers_or_a_codec_error(cut: int, flips: list[tuple[int, int]], tmp_path: Path) -> None:
    save_file({"x": torch.ones(4, 4), "y": torch.ones(3).bfloat16()}, tmp_path / "x")
    content = bytearray((tmp_path / "x").read_bytes())
    for place, value in flips:
        if place < len(content):
            content[place] = value
    (tmp_path / "x").write_bytes(content[: max(0, len(content) - cut)])
    try:
        file = TensorFile(tmp_path / "x")
    except CodecError:
        return
    for name in file:
        assert file[name].shape == file.shape(name)
