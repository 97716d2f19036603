from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echo_hub.config.file import load_config
from echo_hub.main import app
from echo_hub.net.invitations import hash_of
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.store.invites import read_invites
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
def serving(run: Path) -> Iterator[Store]:
    store = Store.open(RunDirectory(run).database_url)
    yield store
    store.close()


def came(store: Store, node_id: str, invite_id: int) -> None:
    store.node_seen(
        node_id=node_id, public_key=bytes(32), name="n", backend="torch", device="d", now=1.0, invite_id=invite_id
    )


def test_an_invites_token_is_shown_once_with_its_join_command(run: Path, serving: Store) -> None:
    told = said("invite", run, "Ada", "--keys", "2", "--days", "7")
    found = re.search(r"echo-node join http://127.0.0.1:8710 --token ([\w-]{43})\n", told)
    assert found is not None and "2 nodes until" in told and f"http://127.0.0.1:8710/about#invite={found[1]}\n" in told
    (invite,) = serving.read(read_invites)
    assert (invite.name, invite.max_keys, invite.token_hash) == ("Ada", 2, hash_of(found[1]))
    assert invite.expires_at - invite.created_at == pytest.approx(7 * 86_400)
    assert all(found[1].encode() not in path.read_bytes() for path in run.glob("echo.db*"))
    assert found[1] not in said("invites", run) + said("invites", run, "--json")


@pytest.mark.parametrize("name", ["", " Ada", "A\nda", "\x1b[2J", "x" * 65])
def test_an_invalid_name_is_not_invited(run: Path, serving: Store, name: str) -> None:
    with pytest.raises(ConfigError, match="not a valid name"):
        said("invite", run, name)
    assert serving.read(read_invites) == []


def test_a_name_is_taken_until_its_invite_is_revoked(run: Path, serving: Store) -> None:
    said("invite", run, "Ada")
    with pytest.raises(ConfigError, match="with this name exists already"):
        said("invite", run, "Ada")
    said("uninvite", run, "Ada")
    said("invite", run, "Ada")
    assert [invite.revoked_at is None for invite in serving.read(read_invites)] == [False, True]


def test_invites_are_listed_with_their_nodes(run: Path, serving: Store) -> None:
    said("invite", run, "Ada [red]", "--keys", "2")
    said("invite", run, "Bob")
    came(serving, "a" * 20, 1)
    said("uninvite", run, "Bob")
    head, ada, bob = said("invites", run).splitlines()
    assert head.split() == ["Name", "Nodes", "Expires", "Revoked", "Ids"]
    assert re.search(r"Ada \[red\] +1/2 +20\S+ \S+ +a{20}", ada) and re.search(r"Bob +0/3( +20\S+ \S+){2}", bob)
    listed = json.loads(said("invites", run, "--json"))["invites"]
    assert [(one["name"], one["max_keys"], one["node_ids"]) for one in listed] == [
        ("Ada [red]", 2, ["a" * 20]),
        ("Bob", 3, []),
    ]
    assert listed[0]["revoked_at"] is None and listed[1]["revoked_at"] > 0


def test_revoking_an_invite_can_ban_its_nodes(run: Path, serving: Store) -> None:
    said("invite", run, "Ada")
    said("invite", run, "Bob")
    for node_id, invite_id in (("a" * 20, 1), ("b" * 20, 2)):
        came(serving, node_id, invite_id)
    assert "with which 1 node had joined" in said("uninvite", run, "Ada")
    assert serving.read(read_banned_nodes) == frozenset()
    assert f"Banned: {'a' * 20}. " in said("uninvite", run, "Ada", "--ban")
    assert serving.read(read_banned_nodes) == {"a" * 20}
    with pytest.raises(ConfigError, match="No invite has this name"):
        said("uninvite", run, "Eve")
