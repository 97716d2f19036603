"""Task files written by `echo-hub new-task` must pass the test that is written with them, and work in a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echo_hub.commands.new_task_command import TASK
from echo_hub.main import app
from echo_shared.errors import ConfigError


def made(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["new-task", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def run(*command: str | Path, at: Path) -> str:
    own = {"PYTHONPATH": os.pathsep.join([str(at), *sys.path]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=at,
        env={**os.environ, **own},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_written_task_passes_its_test_and_a_trial(tmp_path: Path) -> None:
    place = tmp_path / "mine"
    told = made("sorted_letters", "--directory", place)
    assert f"PYTHONPATH={place} echo-hub try-task python:sorted_letters:make" in told
    assert sorted(path.name for path in place.iterdir()) == ["sorted_letters.py", "test_sorted_letters.py"]
    assert "7 passed" in run("pytest", "-q", "-p", "no:cacheprovider", at=place)
    told = run("echo_hub", "try-task", "python:sorted_letters:make", "--option", "letters=4", "--json", at=place)
    trial = json.loads(told)
    assert trial["warnings"] == [] and trial["problems"][0]["prompt"].startswith("Sort the letters of ")
    assert {len(problem["reference"]) for problem in trial["problems"]} == {4}


def test_the_written_task_is_short() -> None:
    assert len(TASK.splitlines()) <= 32


def test_the_directory_is_named_after_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made("my_own_task")
    assert (tmp_path / "my_own_task" / "my_own_task.py").is_file()


@pytest.mark.parametrize("file", ["taken_task.py", "test_taken_task.py"])
def test_nothing_is_written_over(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text("mine")
    with pytest.raises(ConfigError, match="nothing was written"):
        made("taken_task", "--directory", tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(file, "mine")]


@pytest.mark.parametrize("name", ["my-task", "1st", "class", "a/b", "söß", "json", "echo_hub"])
def test_a_name_that_cannot_be_an_own_module_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        made(name, "--directory", tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        made("my_task", "--directory", tmp_path / "file")
