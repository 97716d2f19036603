"""The node reconnects after the machine has slept or its network has changed. Clocks and addresses are scripted, the
connection is real.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

import echo_shared
from echo_node import machine_watch
from echo_node.core.clocks import ClockReading
from echo_node.core.events import Disconnected
from echo_node.core.troubles import Trouble, TroubleCode
from echo_node.host.clock import read_clocks
from echo_node.host.trouble_log import TroubleLog
from echo_node.machine_watch import MachineWatch, own_addresses
from echo_node.net.client import HubClient
from echo_shared.installation import installed_version
from echo_shared.wire.messages import Welcome
from tests.echo_node.net.test_client import Events, client_of, running


class Machine:
    def __init__(
        self, client: HubClient, events: Events, troubles: TroubleLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.client, self.events, self.troubles = client, events, troubles
        self.asleep_s = self.ahead_s = 0.0
        self.addresses = frozenset({"127.0.0.1", "192.0.2.1"})
        self.woke = 0
        self.inbox: asyncio.Queue[Any] = asyncio.Queue(8)
        monkeypatch.setattr(machine_watch, "read_clocks", self._clocks)
        monkeypatch.setattr(machine_watch, "own_addresses", lambda: self.addresses)
        self.watch = MachineWatch(client, troubles, self, self.inbox)  # type: ignore[arg-type]

    def look_again(self) -> None:
        """Count the calls by which the watch makes the engine chooser look for devices again."""
        self.woke += 1

    def _clocks(self) -> ClockReading:
        now = read_clocks()
        return ClockReading(now.running + self.asleep_s, now.wall + self.asleep_s + self.ahead_s)

    def look(self) -> dict[str, str]:
        self.watch.look()
        return {trouble.code.value: trouble.sentence for trouble in self.troubles.now}


@pytest.fixture
async def machine(hub: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Machine]:
    troubles = TroubleLog()
    client = client_of(hub.url, troubles=troubles)
    async with running(client) as events:
        await events.next(Welcome)
        yield Machine(client, events, troubles, monkeypatch)


async def test_a_machine_that_slept_connects_again_at_once(
    machine: Machine, hub: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert machine.look() == {} and machine.look() == {}
    machine.asleep_s = 7_200.0
    machine.look()
    await machine.events.next(Disconnected)
    await machine.events.next(Welcome)
    assert machine.look() == {} and machine.woke == 1 and hub.handshakes == 2
    assert [record.message for record in caplog.records if record.name.endswith("trouble_log")] == [
        "This machine slept for 2 h; reconnecting.",
        "Reconnected.",
    ]


async def test_a_machine_that_lost_its_address_reconnects_at_once(machine: Machine, hub: Any) -> None:
    machine.look()
    machine.addresses = frozenset({"127.0.0.1", "192.0.2.1", "192.0.2.2"})
    machine.look()
    machine.addresses = frozenset({"127.0.0.1"})
    machine.look()
    assert machine.events.queue.empty() and hub.handshakes == 1, "the lost address was not the connection's"
    machine.addresses = frozenset({"192.0.2.1"})
    machine.look()
    await machine.events.next(Disconnected)
    await machine.events.next(Welcome)
    assert machine.woke == 0 and hub.handshakes == 2


async def test_a_wrong_clock_is_reported_until_it_is_right(machine: Machine) -> None:
    assert machine.look() == {}
    machine.ahead_s = 3 * 3_600.0
    assert list(machine.look()) == ["clock"]
    assert "3 h ahead of the hub's" in machine.look()["clock"]
    machine.ahead_s = 0.0
    assert machine.look() == {} and machine.events.queue.empty(), "it is no reason to reconnect"


async def test_a_newly_installed_release_is_reported_while_the_hub_refuses_this_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(100):
        machine.look()
    monkeypatch.setattr(echo_shared, "__version__", "0.0.0")
    for _ in range(100):
        machine.look()
    assert machine.inbox.empty(), "the hub accepts this release"
    machine.troubles.begin("a test", Trouble(TroubleCode.TOO_OLD, "Too old."))
    for _ in range(30):
        machine.look()
    assert (await machine.inbox.get()).release == installed_version() and machine.inbox.empty()
    while not machine.inbox.full():
        machine.inbox.put_nowait("message")
    for _ in range(30):
        machine.look()
    while not machine.inbox.empty():
        assert machine.inbox.get_nowait() == "message"
    for _ in range(30):
        machine.look()
    assert (await machine.inbox.get()).release == installed_version()


def test_addresses_include_those_that_programs_listen_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert server.getsockname()[0] in own_addresses()
    assert "192.0.2.77" not in own_addresses()
