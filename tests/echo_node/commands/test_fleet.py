from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from echo_node.commands.fleet import FleetAnswer, _ids_of
from echo_node.host.hubs import HubRecord, Hubs
from echo_node.host.paths import NodePaths
from echo_node.main import app
from echo_shared.errors import ConfigError, RemoteProtocolError
from echo_shared.signing import key_file
from echo_shared.signing.identity import Identity, node_id
from echo_shared.signing.owner import claim
from echo_shared.wire.messages import Fleet, FleetNode
from echo_shared.wire.owner_commands import NodeReport, sign_report


@pytest.fixture
async def joined(bare_hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("ECHO_NODE_HOME", str(tmp_path / "home"))
    Hubs(NodePaths.find(None)).save(
        HubRecord(url=bare_hub.url, hub_key_hex=bare_hub.me.public_key.hex(), joined_at=1.0, run_id="r", run_name="R")
    )
    return bare_hub


async def said(*arguments: str, answers: str | None = None) -> str:
    """Run `echo-node fleet` on a thread: the hub in this process must answer it. Return the output."""
    result = await asyncio.to_thread(
        lambda: CliRunner().invoke(app, ["fleet", *arguments], catch_exceptions=False, input=answers),
    )
    assert result.exit_code == 0, result.output
    return result.output


def owned(hub: Any, owner: Identity, name: str, **about: Any) -> FleetNode:
    node = Identity.generate()
    signed = claim(owner, node_id=node.node_id, hub_key=hub.me.public_key)
    fields = {"is_connected": False, "last_seen": 5.0, **about}
    return FleetNode(node_key=node.public_key, claim=signed, name=name, **fields)


async def test_a_code_makes_two_machines_one_owner_s(
    joined: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = json.loads(await said("new", "--json"))["code"]
    assert code in await said("code")
    first = key_file.load(NodePaths.find(None).owner_key)
    with pytest.raises(ConfigError, match="in a fleet already"):
        await said("new")
    monkeypatch.setenv("ECHO_NODE_HOME", str(tmp_path / "second"))
    with pytest.raises(ConfigError, match="in no fleet"):
        await said("code")
    await said("join", answers=f"{code}\n")
    assert key_file.load(NodePaths.find(None).owner_key).public_key == first.public_key
    await said("join", code)
    await said("leave")
    assert not NodePaths.find(None).owner_key.exists()


async def test_another_fleet_s_code_needs_a_leave_first(joined: Any) -> None:
    code = json.loads(await said("new", "--json"))["code"]
    await said("leave")
    await said("new")
    with pytest.raises(ConfigError, match="in another fleet"):
        await said("join", code)


async def test_machines_that_cannot_answer_are_shown_as_such(joined: Any) -> None:
    await said("new")
    owner = key_file.load(NodePaths.find(None).owner_key)
    attic = owned(joined, owner, "attic", rollouts=1_200)
    joined.books_answer = Fleet(nodes=(attic, owned(joined, owner, "old", is_connected=True)))
    text = await said()
    for word in ("attic", "not connected", "did not get the command", "1,200 rollouts", "old", "did not answer"):
        assert word in text
    rows = json.loads(await said("--json"))["nodes"]
    assert [(row["name"], row["is_connected"], row["rollouts"]) for row in rows] == [
        ("attic", False, 1_200),
        ("old", True, 0),
    ]


async def test_a_hub_cannot_add_a_node_to_the_fleet(joined: Any) -> None:
    await said("new")
    joined.books_answer = Fleet(nodes=(owned(joined, Identity.generate(), "stranger"),))
    with pytest.raises(RemoteProtocolError, match="not the owner's"):
        await said()


async def test_a_name_is_looked_up_in_signed_answers_only(joined: Any) -> None:
    """The hub's list is unsigned, so a machine's name in it may be wrong."""
    await said("new")
    owner = key_file.load(NodePaths.find(None).owner_key)
    joined.books_answer = Fleet(nodes=(owned(joined, owner, "attic", is_connected=True),))
    with pytest.raises(ConfigError, match="No connected machine has this name"):
        await said("pause", "attic")
    with pytest.raises(ConfigError, match="Too many machines"):
        await said("resume", *(f"machine{number}" for number in range(33)))


def test_a_name_must_be_one_machine_s() -> None:
    answers = [answer(name) for name in ("twin", "twin", "attic")]
    fleet = FleetAnswer(fleet=Fleet(nodes=tuple(answers)), command_id=bytes(16), to=())
    attic = node_id(answers[2].node_key)
    assert _ids_of(["attic"], fleet) == _ids_of([attic[:8]], fleet) == (attic,)
    with pytest.raises(ConfigError, match="Several machines"):
        _ids_of(["twin"], fleet)


def answer(name: str) -> FleetNode:
    """Return a node that has answered the command of id 0."""
    node = Identity.generate()
    report = sign_report(NodeReport(name=name), bytes(16), node)
    return FleetNode(
        node_key=node.public_key, claim=bytes(64), name="another", is_connected=True, last_seen=5.0, report=report
    )


async def test_lengths_and_ways_to_count_are_checked_first(joined: Any) -> None:
    await said("new")
    with pytest.raises(ConfigError, match="length of time"):
        await said("pause", "--for", "soon")
    with pytest.raises(ConfigError, match="way to count"):
        await said("count", "twice")
    assert joined.handshakes == 0
