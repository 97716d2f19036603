from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echo_hub.config.file import load_config
from echo_hub.main import app
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.store.store import Store
from echo_shared.errors import ConfigError
from tests.echo_hub.written_books import write_books
from tests.echo_hub.written_steps import evaluated, train


def said(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    made = []
    for name, rate in (("one", 5e-4), ("two", 1e-3)):
        directory = RunDirectory(tmp_path / name)
        make_run(directory, load_config(None, {"training": {"learning_rate": rate}, "run": {"name": f"[b]{name}"}}))
        made.append(directory)
    one, two = (Store.open(directory.database_url) for directory in made)
    write_books(one, steps=6)
    for step in (1, 2, 3):
        train(two, step)
    two.record_evaluations(evaluated(3, 0.5))
    one.close()
    two.close()
    return made[0].root, made[1].root


def test_curves_and_settings_stand_side_by_side(runs: tuple[Path, Path]) -> None:
    one, two = runs
    text = said(one, two)
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0].split() == ["Setting", str(one), "([b]one)", str(two), "([b]two)"]
    assert lines[1].split() == ["run.name", '"[b]one"', '"[b]two"']
    assert lines[2].split() == ["training.learning_rate", "0.0005", "0.001"]
    (place,) = [number for number, line in enumerate(lines) if line.startswith("reward ")]
    assert lines[place].endswith(f"0.5   0.5   1        {one} ([b]one)")
    assert "█" in lines[place + 1] and lines[place + 1].split()[-5:-2] == ["3", "3", "3"]
    (place,) = [number for number, line in enumerate(lines) if line.startswith("held-out accuracy, greedy")]
    assert "–" in lines[place] and lines[place + 1].split()[-5:-2] == ["0.5", "0.5", "3"]
    assert "Steps 0 to 6" in text


def test_json_has_every_point(runs: tuple[Path, Path]) -> None:
    told = json.loads(said(*runs, "--json"))
    assert [run["run"] for run in told["runs"]] == [str(run) for run in runs]
    reward = told["runs"][1]["curves"]["mean_reward"]
    assert reward["points"] == [[1, 1.0], [2, 2.0], [3, 3.0]]
    assert (reward["last"], reward["best"], reward["best_step"]) == (3.0, 3.0, 3)
    assert told["settings"]["training.learning_rate"] == [5e-4, 1e-3]


def test_single_curves_are_chosen_by_their_keys(runs: tuple[Path, Path]) -> None:
    told = json.loads(said(*runs, "--figure", "idle_share", "--json"))
    assert [list(run["curves"]) for run in told["runs"]] == [["idle_share"]] * 2
    with pytest.raises(ConfigError, match="has this curve") as caught:
        said(*runs, "--figure", "rewards")
    assert "mean_reward" in str(caught.value)


def test_a_run_compared_with_itself_has_equal_settings(runs: tuple[Path, Path]) -> None:
    assert said(runs[0], runs[0]).startswith("All settings are the same.")


def test_runs_that_cannot_be_compared_are_refused(runs: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to compare"):
        said(runs[0])
    with pytest.raises(ConfigError, match="not a run directory"):
        said(runs[0], tmp_path)
    make_run(RunDirectory(tmp_path / "new"), load_config(None, {}))
    with pytest.raises(ConfigError, match="has not been served yet"):
        said(runs[0], tmp_path / "new")
