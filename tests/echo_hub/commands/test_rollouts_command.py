from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from echo_hub.config.file import load_config
from echo_hub.core.accounting.effects import GroupOpened, RolloutsLeased
from echo_hub.main import app
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.store.store import Store
from echo_shared.errors import ConfigError
from tests.echo_hub.written_rollouts import NODE, REWARDS, TEXTS, write_rollouts


def said(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = RunDirectory(tmp_path / "run")
    make_run(directory, load_config(None, {}))
    store = Store.open(directory.database_url)
    write_rollouts(store, PromptCodec.load(resolve_base("builtin:tiny")))
    store.close()
    return directory.root


def listed(*arguments: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said("rollouts", *arguments, "--json"))
    return found


def test_the_table_has_a_line_a_rollout(run: Path) -> None:
    head, *lines = said("rollouts", run).splitlines()
    assert head.split()[:4] == ["Id", "Group", "Step", "Version"] and len(lines) == 6
    assert "dropped: no_advantage" in lines[0] and "all wrong" in lines[0]
    assert "<script>alert(1)</script>" in lines[-1] and lines[-1].split()[:3] == ["1-0", "0", "1"]


def test_rollouts_in_progress_are_not_reported_as_lost(run: Path) -> None:
    store = Store.open(RunDirectory(run).database_url)
    lease = RolloutsLeased(lease_id=9, node_id=NODE, group_id=9, indices=(0,), turn=0, policy_version=0, deadline=99.0)
    store.apply([GroupOpened(group_id=9, seed=9), lease], now=50.0)
    store.close()
    (line,) = [line for line in said("rollouts", run).splitlines() if line.split()[0] == "9-0"]
    assert "(being sampled)" in line and "never" not in line


def test_json_continues_where_the_last_list_ended(run: Path) -> None:
    first = listed(run, "--limit", "4")
    rest = listed(run, "--before", first["before"])
    ids = [row["rollout_id"] for row in [*first["rollouts"], *rest["rollouts"]]]
    assert ids == ["3-1", "3-0", "2-1", "2-0", "1-1", "1-0"] and rest["before"] == ""
    assert {row["text"].partition("<eos>")[0] for row in first["rollouts"]} == set(TEXTS[2:])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--step", "1"), ["2-1", "2-0", "1-1", "1-0"]),
        (("--group", "2"), ["3-1", "3-0"]),
        (("--node", NODE, "--state", "trained"), ["2-1", "2-0"]),
        (("--version", "1"), []),
        (("--drop", "no_advantage"), ["3-1", "3-0"]),
        (("--check", "failed"), []),
        (("--reward-min", "0.25", "--reward-max", "0.5"), ["2-1", "2-0"]),
        (("--tokens-min", "10", "--tokens-max", "13"), ["3-1", "3-0", "2-1"]),
        (("--text", "ALERT"), ["1-0"]),
    ],
)
def test_the_filters_are_those_of_the_page(run: Path, arguments: tuple[str, ...], expected: list[str]) -> None:
    assert [row["rollout_id"] for row in listed(run, *arguments)["rollouts"]] == expected


@pytest.mark.parametrize("wrong", [("--drop", "none"), ("--state", "gone"), ("--before", "x"), ("--reward-min", "nan")])
def test_an_invalid_search_is_refused(run: Path, wrong: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="filter for rollouts is invalid"):
        said("rollouts", run, *wrong)


def test_parquet_has_everything_of_each(run: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    file = tmp_path / "all.parquet"
    assert "Wrote 6 rollouts" in said("rollouts", run, "--parquet", file)
    table = parquet.read_table(file)
    rows = table.to_pylist()[::-1]
    assert [row["reward"] for row in rows] == list(REWARDS)
    assert [row["completion"].partition("<eos>")[0] for row in rows] == list(TEXTS)
    assert all(len(row["completion_ids"]) == len(row["behavior_logprobs"]) == row["num_tokens"] for row in rows)
    assert [span["num_tokens"] for span in rows[0]["spans"]] == [3, rows[0]["num_tokens"] - 3]
    assert all("+" in row["prompt"] for row in rows)
    assert rows[0]["step"] == 1 and rows[5]["step"] is None and rows[5]["drop_reason"] == "no_advantage"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.parquet", "run"]
    said("rollouts", run, "--drop", "no_advantage", "--parquet", file)
    assert parquet.read_table(file).num_rows == 2


def test_a_file_that_cannot_be_written_is_named(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    with pytest.raises(ConfigError, match="cannot be written"):
        said("rollouts", run, "--parquet", tmp_path / "nowhere" / "all.parquet")
