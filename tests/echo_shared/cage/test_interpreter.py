"""`directories` returns all directories that this Python must read within a cage (sandbox), and none that a cage must
hide.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import echo_node
from echo_shared.cage import interpreter


def test_python_its_libraries_and_this_package_are_readable() -> None:
    found = interpreter.directories()
    for needed in (json.__file__, pytest.__file__, echo_node.__file__):
        assert any(Path(str(needed)).resolve().is_relative_to(path) for path in found)
    assert all(path.is_dir() or path.is_file() for path in found)


def test_the_home_directory_and_its_parents_are_not_readable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "lib").mkdir(parents=True)
    monkeypatch.setattr(Path, "home", lambda: home)
    paths = [home, home / "lib", tmp_path, Path("/"), tmp_path / "missing"]
    assert interpreter.narrow(paths) == ((home / "lib").resolve(),)


def test_the_working_directory_is_not_read_because_a_module_is_run_from_it(tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text("from echo_shared.cage import interpreter as i; print(*i.directories())")
    said = subprocess.run(
        [sys.executable, "-m", "told"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120
    )
    assert str(tmp_path.resolve()) not in said.stdout.split()
