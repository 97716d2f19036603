from __future__ import annotations

import asyncio

import pytest

from echo_hub.intake import command_relay
from echo_hub.intake.command_relay import CommandRelay
from echo_shared.errors import RefusedError
from echo_shared.wire.messages import FleetCommand, FleetReport, FromHub
from echo_shared.wire.owner_commands import id_of

COMMAND = FleetCommand(body=b"{}", signature=bytes(64))


def report(command: FleetCommand = COMMAND) -> FleetReport:
    return FleetReport(command_id=id_of(command), body=b"{}", signature=bytes(64))


class Line:
    """Stand-in for the hub's connections, on which only nodes "a" and "b" are connected. It records all messages."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, FromHub]] = []

    def send(self, node_id: str, message: FromHub) -> bool:
        self.sent.append((node_id, message))
        return node_id in ("a", "b")


@pytest.fixture
def line() -> Line:
    return Line()


async def test_reports_come_back_from_the_nodes_that_were_asked(line: Line) -> None:
    relay = CommandRelay(line)
    asking = asyncio.create_task(relay.ask(COMMAND, ["a", "b", "gone"]))
    await asyncio.sleep(0)
    relay.reported("c", report())
    relay.reported("gone", report())
    relay.reported("a", report(COMMAND.model_copy(update={"body": b"other"})))
    relay.reported("a", report())
    assert not asking.done()
    relay.reported("b", report())
    assert dict(await asking) == {"a": report(), "b": report()}
    assert line.sent == [("a", COMMAND), ("b", COMMAND), ("gone", COMMAND)]


async def test_a_silent_node_is_not_waited_for_long(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_relay, "REPORTS_S", 0.01)
    relay = CommandRelay(line)
    asking = asyncio.create_task(relay.ask(COMMAND, ["a", "b"]))
    await asyncio.sleep(0)
    relay.reported("a", report())
    assert dict(await asking) == {"a": report()}
    relay.reported("b", report())  # Too late: the command's answer was already returned.
    assert await relay.ask(COMMAND, ["gone"]) == {}


async def test_the_same_command_is_not_sent_twice_at_a_time(line: Line) -> None:
    relay = CommandRelay(line)
    asking = asyncio.create_task(relay.ask(COMMAND, ["a"]))
    await asyncio.sleep(0)
    with pytest.raises(RefusedError, match="under way"):
        await relay.ask(COMMAND, ["a"])
    relay.reported("a", report())
    assert set(await asking) == {"a"}
