"""`echo-hub credit` and `echo-hub team`, on the store of a run that a hub serves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from echo_hub.config.file import load_config
from echo_hub.main import app
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.store.board import read_board
from echo_hub.store.database import write_meta
from echo_hub.store.store import Store
from echo_hub.store.teams import change_team, read_own_team
from echo_shared.errors import CodecError, ConfigError
from echo_shared.records import run_credit
from echo_shared.records.credit import BoardQuery
from echo_shared.signing import key_file
from echo_shared.signing.identity import fingerprint
from echo_shared.wire.messages import TeamWanted
from tests.echo_hub.store.conftest import Records


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def served(directory: Path, name: str) -> Store:
    make_run(RunDirectory(directory), load_config(None, {"run": {"name": name}}))
    store = Store.open(RunDirectory(directory).database_url)
    me = key_file.load(RunDirectory(directory).key)
    store.write(write_meta, "run_id", f"{me.node_id}-1")
    return store


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Store]:
    store = served(tmp_path / "here", "here")
    yield store
    store.close()


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Return the credit export of another run, in which node "a" has a trained step."""
    store = served(tmp_path / "there", "there")
    store.node_seen(node_id="a", public_key=bytes(32), name="ada", backend="torch", device="d", now=1.0)
    store.apply(Records.one_step(1, lease_id=1, group_id=0, node_id="a"), now=1.0)
    store.close()
    result = invoke("credit", "export", tmp_path / "there")
    assert result.exit_code == 0, result.output
    (tmp_path / "export.json").write_text(result.stdout)
    return tmp_path / "export.json"


def test_credit_goes_from_run_to_run_once(tmp_path: Path, here: Store, export: Path) -> None:
    said = run_credit.verified(export.read_bytes())
    assert [(node.node_name, node.rollouts, node.tokens) for node in said.nodes] == [("ada", 2, 5)]
    key = fingerprint(bytes.fromhex(said.hub_key))
    with pytest.raises(ConfigError, match="unknown to this run"):
        invoke("credit", "import", tmp_path / "here", export)
    with pytest.raises(ConfigError, match="signed by another hub"):
        invoke("credit", "import", tmp_path / "here", export, "--hub-key", "00" * 32)
    assert (
        "Added 1 node of the run there"
        in invoke("credit", "import", tmp_path / "here", export, "--hub-key", key).output
    )
    assert "Nothing was changed" in invoke("credit", "import", tmp_path / "here", export).output
    (row,) = here.read(read_board, BoardQuery(), 9.0).rows
    assert (row.name, row.all_rollouts, row.elsewhere_tokens) == ("ada", 2, 5)


def test_the_runs_own_export_and_a_changed_one_are_refused(tmp_path: Path, here: Store, export: Path) -> None:
    with pytest.raises(ConfigError, match="own credit"):
        invoke("credit", "import", tmp_path / "there", export)
    document = json.loads(export.read_text())
    document["credit"]["nodes"][0]["rollouts"] = 9
    export.write_text(json.dumps(document))
    with pytest.raises(CodecError, match="signature is wrong"):
        invoke("credit", "import", tmp_path / "here", export)
    with pytest.raises(ConfigError, match="cannot be read"):
        invoke("credit", "import", tmp_path / "here", tmp_path / "missing")


def test_the_operator_removes_a_team(tmp_path: Path, here: Store) -> None:
    here.node_seen(node_id="a", public_key=bytes(32), name="ada", backend="torch", device="d", now=1.0)
    here.apply(Records.one_step(1, lease_id=1, group_id=0, node_id="a"), now=1.0)
    here.write(change_team, "a", TeamWanted(action="create", name="Bad words"), 1.0)
    assert "Removed" in invoke("team", "remove", tmp_path / "here", "BAD  words").output
    assert here.read(read_own_team, "a", 2.0).name == ""
    with pytest.raises(ConfigError, match="No team"):
        invoke("team", "remove", tmp_path / "here", "Bad words")
