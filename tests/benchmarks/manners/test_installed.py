from pathlib import Path

import pytest

from benchmarks.manners import INSTALLED, installed, plan


def test_without_a_wheelhouse_the_case_names_the_missing_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "WHEELHOUSE", tmp_path)
    assert next(case for case in plan() if case.name == INSTALLED).lacks == "a wheelhouse: make wheelhouse"
    (tmp_path / "manifest.json").write_text("{}")
    assert next(case for case in plan() if case.name == INSTALLED).lacks == ""


def test_a_new_user_has_no_compiler() -> None:
    assert not {"cc", "c++", "gcc", "g++", "clang", "make", "cmake", "ninja"} & set(installed.TOOLS)
