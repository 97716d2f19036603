"""The hub finds the GGUF file that the settings offer to nodes with llama.cpp, and compares it with the tiny base
model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from echo_hub.config.sections import ModelConfig
from echo_hub.run import gguf_fit
from echo_hub.run.base_files import resolve_base
from echo_hub.run.offered_gguf import OfferedGguf, offered_gguf
from echo_shared.artefacts.hashed_files import describe_file
from echo_shared.errors import ConfigError
from tests.gguf_files import write_gguf


@pytest.fixture(scope="module")
def base() -> Path:
    return resolve_base("builtin:tiny")


@pytest.fixture(scope="module")
def file(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(base, tmp_path_factory.mktemp("gguf") / "tiny.gguf", "q4_0")


def offered(reference: str | Path, base: Path, tmp_path: Path, *, of: str = "builtin:tiny") -> OfferedGguf | None:
    return offered_gguf(ModelConfig(base=of, gguf=str(reference)), base, known=tmp_path / "known.json")


def test_a_file_is_offered_with_the_bases_config(base: Path, file: Path, tmp_path: Path) -> None:
    found = offered(file, base, tmp_path)
    assert found is not None
    assert (found.parts, found.weights) == ((file,), "q4_0")
    assert found.files == {"config.json": base / "config.json", "tiny.gguf": file}
    assert found.described == tuple(describe_file(path, name=name) for name, path in found.files.items())
    assert found.precision("run") != found.precision("run2") and found.precision("run").startswith("q4_0@")


def test_nothing_is_offered_unless_it_is_set_or_the_base_is_a_file(base: Path, file: Path, tmp_path: Path) -> None:
    assert offered("", base, tmp_path) is None and offered("none", base, tmp_path) is None
    found = offered("", base, tmp_path, of=str(file))
    assert found is not None and found.parts == (file,)
    assert offered("none", base, tmp_path, of=str(file)) is None


def test_all_parts_of_a_split_model_are_offered(base: Path, tmp_path: Path) -> None:
    first = write_gguf(base, tmp_path / "tiny.gguf", "q8_0", tensors_each=20)
    parts = tuple(sorted(tmp_path.glob("tiny-*.gguf")))
    for reference in parts:
        found = offered(reference, base, tmp_path)
        assert found is not None and found.parts == parts and parts[0] == first
        assert [entry.path for entry in found.described] == ["config.json", *(part.name for part in parts)]
    parts[1].unlink()
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        offered(first, base, tmp_path)
    assert parts[1].name in str(caught.value.got)


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
def test_links_of_a_model_hubs_cache_are_followed(base: Path, file: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / "0a1b2c"
    blob.parent.mkdir()
    shutil.copyfile(file, blob)
    link = tmp_path / "snapshots" / "tiny.gguf"
    link.parent.mkdir()
    link.symlink_to(Path("..") / "blobs" / "0a1b2c")
    found, direct = offered(link, base, tmp_path), offered(file, base, tmp_path)
    assert found is not None and direct is not None
    assert found.parts == (link,) and found.described == direct.described, "name of the link, content of the file"


def test_a_file_is_read_again_only_after_it_changed(
    base: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.gguf"
    shutil.copyfile(file, own)
    looks = []
    check = gguf_fit.check_fits
    monkeypatch.setattr(gguf_fit, "check_fits", lambda *about: (looks.append(1), check(*about)))
    first = offered(own, base, tmp_path)
    assert offered(own, base, tmp_path) == first and len(looks) == 1
    write_gguf(base, own, "q8_0")
    second = offered(own, base, tmp_path)
    assert len(looks) == 2 and second is not None and first is not None
    assert (first.weights, second.weights) == ("q4_0", "q8_0") and first.described[1] != second.described[1]
    (tmp_path / "known.json").write_text("{}")
    assert offered(own, base, tmp_path) == second and len(looks) == 3


@pytest.mark.parametrize("reference", ["missing.gguf", "owner/name", "config.json", "owner/name:model.bin"])
def test_a_missing_file_is_an_error(base: Path, tmp_path: Path, reference: str) -> None:
    with pytest.raises(ConfigError, match="no such GGUF file") as caught:
        offered(reference, base, tmp_path)
    assert reference in str(caught.value.got) and caught.value.do


def test_a_damaged_file_is_an_error(base: Path, file: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.gguf"
    own.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        offered(own, base, tmp_path)
    assert str(own) in str(caught.value.got) and caught.value.do
    assert not (tmp_path / "known.json").exists()


def test_parts_come_from_the_model_hub_at_one_revision(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(base, tmp_path / "there" / "tiny.gguf", "q8_0", tensors_each=30)
    asked: list[Any] = []

    def download(repo: str, name: str, *, revision: str | None) -> str:
        asked.append((repo, name, revision))
        path = tmp_path / "there" / Path(name).name
        if not path.exists():
            raise FileNotFoundError("404")
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    found = offered("owner/na.me:Q8/tiny-00001-of-00002.gguf@main", base, tmp_path)
    assert found is not None and len(found.parts) == 2
    names = ["Q8/tiny-00001-of-00002.gguf", "Q8/tiny-00002-of-00002.gguf"]
    assert asked == [("owner/na.me", name, "main") for name in names]
    with pytest.raises(ConfigError, match="cannot be downloaded") as caught:
        offered("owner/na.me:other.gguf", base, tmp_path)
    assert "404" in str(caught.value.got) and asked[-1] == ("owner/na.me", "other.gguf", None)
