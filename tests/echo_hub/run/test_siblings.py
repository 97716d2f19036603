from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from echo_hub.config.file import load_config
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.run.siblings import siblings_of
from echo_shared.errors import ConfigError


def test_what_is_no_run_of_this_hub_is_passed_over(tmp_path: Path) -> None:
    run, other = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "a run")
    make_run(run, load_config(None, {}))
    make_run(other, load_config(None, {}), beside=run)
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "empty").mkdir()
    shutil.copytree(other.root, tmp_path / "without a key")
    (tmp_path / "without a key" / "hub.key").unlink()
    shutil.copytree(other.root, tmp_path / "damaged")
    (tmp_path / "damaged" / "hub.key").write_text("no key")
    assert siblings_of(run) == [other] and siblings_of(other) == [run]


def test_a_run_without_its_own_key_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        siblings_of(RunDirectory(tmp_path / "nowhere"))
