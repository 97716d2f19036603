"""The benchmark's payload has the form of a PEFT adapter, cannot be compressed, and holds only finite numbers."""

import json
import zlib
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.dissemination.rounds import digest_of, write_adapter


def test_the_payload_has_the_requested_size_and_finite_numbers(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", 500_000, seed=1)
    weights = (tmp_path / "a" / "adapter_model.safetensors").read_bytes()
    assert abs(len(weights) - 500_000) < 2_000
    assert len(zlib.compress(weights)) > 0.98 * len(weights)
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    for weight in load_file(tmp_path / "a" / "adapter_model.safetensors").values():
        assert weight.dtype is torch.bfloat16
        assert torch.isfinite(weight).all()


def test_each_version_has_another_digest(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("same", 1), ("b", 2)):
        write_adapter(tmp_path / name, 10_000, seed=seed)
    assert digest_of(tmp_path / "a") == digest_of(tmp_path / "same") != digest_of(tmp_path / "b")
