from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from echo_hub.main import app
from echo_hub.run.directory import RunDirectory
from tests.echo_hub.lifecycle.test_forking import parent

__all__ = ["parent"]


def test_fork_prints_what_it_made_and_the_next_command(parent: RunDirectory, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["fork", str(parent.root), str(tmp_path / "a"), "--set", "training.steps=50"])
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "from version 3 of first" in said and "The optimizer resumes its state." in said
    assert "Its first step is 4 of 50." in said
    result = CliRunner().invoke(app, ["fork", str(parent.root), str(tmp_path / "b"), "--at", "2"])
    assert "there is no checkpoint of step 2 (checkpoints: 3)" in " ".join(result.output.split())
