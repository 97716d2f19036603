"""A base model from a GGUF file is identified by that file and its weights. The identification must not depend on the
version of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echo_hub.bundles.base_files import check_base, naming_files, sha256
from echo_hub.bundles.reading import BundledRun
from echo_shared.errors import CodecError, ConfigError


def run(base: dict[str, str]) -> BundledRun:
    known: dict[str, Any] = {"settings": {}, "started_with": 0, "accounting": {}, "retired": {}, "versions": ()}
    return BundledRun.model_validate({**known, "base": base, "rollouts": 0})


@pytest.fixture
def converted(tmp_path: Path) -> tuple[Path, Path]:
    """Return a GGUF file of two parts, and the directory of its conversion."""
    directory = tmp_path / "converted"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "config.json").write_bytes(b'{"transformers_version": "5.23.0"}')
    for number in (1, 2):
        (tmp_path / f"model-0000{number}-of-00002.gguf").write_bytes(b"GGUF" + bytes([number]))
    return tmp_path / "model-00001-of-00002.gguf", directory


def test_a_gguf_base_is_named_without_what_transformers_writes(converted: tuple[Path, Path]) -> None:
    file, directory = converted
    named = {name: sha256(path) for name, path in naming_files(str(file), directory).items()}
    assert named.keys() == {"model-00001-of-00002.gguf", "model-00002-of-00002.gguf", "model.safetensors"}
    (directory / "config.json").write_bytes(b'{"transformers_version": "5.24.0"}')
    check_base(str(file), directory, run(named))
    file.with_name("model-00002-of-00002.gguf").write_bytes(b"GGUF of another model")
    with pytest.raises(ConfigError, match=r"model-00002-of-00002.gguf of .* has another content"):
        check_base(str(file), directory, run(named))


def test_a_directory_is_named_by_all_its_files(converted: tuple[Path, Path]) -> None:
    _, directory = converted
    named = {name: sha256(path) for name, path in naming_files(str(directory), directory).items()}
    assert named.keys() == {"model.safetensors", "config.json"}
    check_base(str(directory), directory, run(named))
    (directory / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config.json of .* is missing"):
        check_base(str(directory), directory, run(named))
    with pytest.raises(CodecError, match="names no weights"):
        check_base(str(directory), directory, run({"config.json": named["config.json"]}))
