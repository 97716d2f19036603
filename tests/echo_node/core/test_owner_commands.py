from __future__ import annotations

import pytest

from echo_node.core import owner_commands
from echo_node.core.clocks import ClockReading
from echo_node.core.owner_commands import MOST_AGE_S, OwnerCommands
from echo_shared.errors import RemoteProtocolError
from echo_shared.signing.identity import Identity
from echo_shared.wire.messages import FleetCommand
from echo_shared.wire.owner_commands import OwnerCommand, sign_command

OWNER = Identity.generate()
HUB = bytes(32)
NOW = ClockReading(running=5e3, wall=1e9)


@pytest.fixture
def commands() -> OwnerCommands:
    return OwnerCommands(node_id="a", owner_key=OWNER.public_key, hub_key=HUB, started_s=NOW.running - 60.0)


def said(owner: Identity = OWNER, **changes: object) -> FleetCommand:
    fields = {"verb": "pause", "hub_key": HUB.hex(), "sender": "b", "sent_at": NOW.wall, **changes}
    return sign_command(OwnerCommand(**fields), owner)


@pytest.mark.parametrize("to", [(), ("a",), ("c", "a")])
def test_the_node_obeys_its_owner(commands: OwnerCommands, to: tuple[str, ...]) -> None:
    assert commands.take(said(to=to, pause_s=9.0), NOW).pause_s == 9.0


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (said(owner=Identity.generate()), "not signed"),
        (said(to=("c",)), "another node or hub"),
        (said(hub_key="ab" * 32), "another node or hub"),
        (said(sent_at=NOW.wall - MOST_AGE_S - 1), "too old"),
        (said(sent_at=NOW.wall + MOST_AGE_S + 1), "clocks"),
        (said(sent_at=NOW.wall - 61.0), "older than this node's start"),
    ],
)
def test_other_commands_are_refused(commands: OwnerCommands, command: FleetCommand, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        commands.take(command, NOW)


def test_a_command_is_obeyed_once_and_none_before_it(commands: OwnerCommands) -> None:
    pause, resume = said(sent_at=NOW.wall - 2), said(verb="resume", sent_at=NOW.wall - 1)
    commands.take(resume, NOW)
    for late in (resume, pause):
        with pytest.raises(RemoteProtocolError, match="before"):
            commands.take(late, NOW)
    commands.take(said(sender="c", sent_at=NOW.wall - 30), NOW)


def test_commands_are_obeyed_after_the_nodes_clock_was_set_back(commands: OwnerCommands) -> None:
    """When a computer starts, its clock may be hours ahead: Windows stores local time in the machine's clock."""
    later = ClockReading(running=NOW.running + 30.0, wall=NOW.wall - 8 * 3_600.0)
    commands.take(said(sent_at=later.wall), later)
    with pytest.raises(RemoteProtocolError, match="older than this node's start"):
        commands.take(said(sender="c", sent_at=later.wall - 91.0), later)


def test_a_refused_command_blocks_no_later_one(commands: OwnerCommands) -> None:
    with pytest.raises(RemoteProtocolError):
        commands.take(said(to=("c",), sent_at=NOW.wall + 200), NOW)
    commands.take(said(), NOW)


def test_few_senders_are_remembered(commands: OwnerCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_commands, "MOST_SENDERS", 1)
    commands.take(said(), NOW)
    with pytest.raises(RemoteProtocolError, match="Too many machines"):
        commands.take(said(sender="c"), NOW)
    commands.take(said(sent_at=NOW.wall + 1), NOW)
