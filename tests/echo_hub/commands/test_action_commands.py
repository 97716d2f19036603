"""Operator commands on a run whose hub is stopped; the commands read and write the run's store directly."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echo_hub.actions.records import ActionOutcome, ActionRecord
from echo_hub.actions.requests import TABLE
from echo_hub.commands.action_commands import me, tell
from echo_hub.config.file import load_config
from echo_hub.core.accounting.effects import ActionSettled
from echo_hub.dashboard.access.api_tokens import hash_of
from echo_hub.main import app
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.store.actions import read_action_log, read_api_tokens, read_wanted_actions, settle_action
from echo_hub.store.known_nodes import read_banned_nodes
from echo_hub.store.store import Store
from echo_shared.errors import ConfigError


def said(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_run(RunDirectory(tmp_path / "run"), load_config(None, {"server": {"port": 8710}}))
    return tmp_path / "run"


@pytest.fixture
def store(run: Path) -> Iterator[Store]:
    opened = Store.open(RunDirectory(run).database_url)
    opened.node_seen(node_id="a" * 20, public_key=bytes(32), name="n", backend="torch", device="d", now=1.0)
    yield opened
    opened.close()


def test_without_an_action_all_are_listed(run: Path) -> None:
    listed = said("act", run)
    assert all(re.search(rf"^ *{name}\b", listed, re.MULTILINE) for name in TABLE)


def test_an_action_for_the_hub_is_stored_until_it_is_served(run: Path, store: Store) -> None:
    assert "Stored as action 1" in said("act", run, "max_staleness", "4", "--wait", "0")
    assert "Stored as action 2" in said("act", run, "learning_rate", "value=1e-4", "--wait", "0")
    (first, second) = store.read(read_wanted_actions)
    assert (first.request, second.request) == ({"value": 4}, {"value": 1e-4})
    assert (first.who, first.via) == (me().who, "cli")


def test_the_outcome_of_an_action_is_shown(run: Path, store: Store) -> None:
    said("act", run, "max_staleness", "4", "--wait", "0")
    store.write(settle_action, ActionSettled(number=1, done=True, before=2, after=4), 5.0)
    listed = said("audit", run)
    assert re.search(r"1 .*cli +max_staleness value=4 +done +2 +4", listed)
    (one,) = json.loads(said("audit", run, "--json"))["actions"]
    assert (one["before"], one["after"], one["outcome"]) == (2, 4, "done")
    said("undo", run, "1", "--wait", "0")
    (undo,) = store.read(read_wanted_actions)
    assert (undo.action, undo.request, undo.undoes) == ("max_staleness", {"value": 2}, 1)
    for number in ("1", "2", "99"):
        with pytest.raises(ConfigError, match="cannot be undone"):
            said("undo", run, number)


@pytest.mark.parametrize(
    ("before", "after", "shown"), [(None, 20, ": unset -> 20"), (0, None, ": 0 -> unset"), (None, None, "")]
)
def test_a_value_that_is_not_set_is_named(
    before: object, after: object, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"number": 3, "asked_at": 1.0, "via": "cli", "who": "me", "action": "tenant_quota", "request": {}}
    tell(ActionRecord(**known, outcome=ActionOutcome.DONE, before=before, after=after))
    assert capsys.readouterr().out == f"Done, action 3{shown}.\n"


def test_nodes_are_banned_by_every_command_in_the_same_way(run: Path, store: Store) -> None:
    assert "False -> True" in said("act", run, "ban", "a" * 20)
    with pytest.raises(ConfigError, match="refused"):
        said("act", run, "ban", "a" * 20)
    said("unban", run, "a" * 20)
    said("ban", run, "a" * 20)
    assert [one.action for one in store.read(read_action_log, limit=9)] == ["ban", "unban", "ban", "ban"]
    assert store.read(read_banned_nodes) == {"a" * 20}


def test_a_token_is_shown_once_and_never_in_the_list(run: Path, store: Store) -> None:
    told = said("act", run, "token", "ci [red]", "scope=operate", "days=7")
    (secret,) = re.findall(r"Shown only once: (echo_[\w-]{43})", told)
    (token,) = store.read(read_api_tokens)
    assert (token.token_hash, token.scope) == (hash_of(secret), "operate")
    assert secret not in said("tokens", run) + said("tokens", run, "--json") + said("audit", run, "--json")
    assert all(secret.encode() not in path.read_bytes() for path in run.glob("echo.db*"))
    assert "ci [red]" in said("tokens", run)
    said("act", run, "revoke_token", "ci [red]")
    assert json.loads(said("tokens", run, "--json"))["tokens"][0]["revoked_at"] > 0


@pytest.mark.parametrize(
    "given", [("explode",), ("max_staleness",), ("max_staleness", "x"), ("pause", "1"), ("ban", "a b"), ("token", "")]
)
def test_an_impossible_action_is_refused_and_not_stored(run: Path, store: Store, given: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="action is invalid"):
        said("act", run, *given)
    assert store.read(read_action_log, limit=9) == []


def test_a_tenants_token_is_shown_as_both_clients_want_it(run: Path, store: Store) -> None:
    told = said("act", run, "token", "Ada", "use")
    (secret,) = re.findall(r"Shown only once: (echo_[\w-]{43})", told)
    assert f"TINKER_API_KEY=tml-{secret}\n" in told and f"OPENAI_API_KEY={secret}\n" in told
    assert "personal data" in told
    (token,) = store.read(read_api_tokens)
    assert (token.name, token.scope) == ("Ada", "use")
