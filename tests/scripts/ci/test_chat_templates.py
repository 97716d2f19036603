from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from scripts.ci.chat_templates import extract


def archive_of(names: list[str], path: Path) -> Path:
    with tarfile.open(path, "w:gz") as files:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(name)
            files.addfile(member, io.BytesIO(name.encode()))
    return path


def test_only_the_templates_are_extracted(tmp_path: Path) -> None:
    folder = "llama_cpp_python-1.0/vendor/llama.cpp/models/templates"
    names = [f"{folder}/A-1.5B.jinja", f"{folder}/README.md", "llama_cpp_python-1.0/B.jinja"]
    assert extract(archive_of(names, tmp_path / "a.tar.gz"), tmp_path / "out") == 1
    assert [file.read_text() for file in (tmp_path / "out").iterdir()] == names[:1]


def test_an_archive_without_templates_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no templates"):
        extract(archive_of(["llama_cpp_python-1.0/README.md"], tmp_path / "a.tar.gz"), tmp_path / "out")
