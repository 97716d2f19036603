from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from echo_hub.config.file import load_config
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.run.siblings import siblings_of
from echo_shared.errors import ConfigError, StorageError

NOBODY = 65_534


def test_directories_that_are_no_runs_of_this_hub_are_ignored(tmp_path: Path) -> None:
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


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such users")
def test_unreadable_directories_next_to_a_run_are_ignored() -> None:
    """Runs may lie in a directory like /tmp, next to directories that the hub's user cannot read."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        run, beside, closed = (RunDirectory(Path(place) / name) for name in ("run", "beside", "closed"))
        make_run(run, load_config(None, {}))
        make_run(beside, load_config(None, {}), beside=run)
        closed.root.mkdir()
        closed.root.chmod(0)
        is_root = os.geteuid() == 0
        if is_root:  # Root can read every directory, so the test continues as another user.
            for path in (Path(place), *Path(place).glob("[rb]*"), *Path(place).glob("[rb]*/*")):
                os.chown(path, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        try:
            assert siblings_of(run) == [beside]
            Path(place).chmod(0o300)
            with pytest.raises(StorageError, match="cannot be read"):
                siblings_of(run)
        finally:
            if is_root:
                os.seteuid(0)
            Path(place).chmod(0o700)
            closed.root.chmod(0o700)
