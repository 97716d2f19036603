"""The node's current run starts once, is updated by each Welcome, and ends when another run takes its place. The shell
of each run (the I/O around its work loop) is real.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo_node.connections import NodeNetwork
from echo_node.core.events import Spooled
from echo_node.core.troubles import TroubleCode
from echo_node.current_run import CurrentRun
from echo_node.host.address import HubAddress
from echo_node.host.hubs import HubRecord, Joining
from echo_node.host.paths import NodePaths
from echo_node.host.trouble_log import TroubleLog
from echo_node.shell import RunShell
from echo_shared.errors import DISK_FULL, StorageError
from echo_shared.swarm import Swarm, SwarmSettings, open_swarm
from echo_shared.wire.messages import Welcome
from tests.echo_node.host.test_spool import spooled
from tests.echo_node.test_shell import Site
from tests.echo_shared.wire.messages.examples import TOTALS

PATIENCE_S = 60.0


class Run(CurrentRun):
    """A run that opens its shells in the test's `Place`."""

    place: Place

    async def _open_shell(self, welcome: Welcome, hub_key: bytes, connections: NodeNetwork) -> RunShell:
        return await self.place.open(welcome, hub_key)


class Place:
    """A node's directory in which its shell (the node's I/O) is opened for a run. Opening fails once for each entry of
    `failures`.
    """

    def __init__(self, hub: Any, swarm: Swarm, directory: Path) -> None:
        self.hub = hub
        self.sites: list[Site] = []
        self.failures: list[StorageError] = []
        self.troubles = TroubleLog()
        self._swarm = swarm
        self._directory = directory
        self.run = self.joined()

    def joined(self, *, patient: bool = True, pinned: HubRecord | None = None) -> CurrentRun:
        address = HubAddress.parse(self.hub.url, insecure=False)
        joining = Joining(address=address, pinned=pinned, invite_token=None, patient=patient)
        engines: Any = SimpleNamespace(run_id=None)
        self.run = Run(NodePaths.find(self._directory), joining, engines, asyncio.Queue(), self.troubles)
        self.run.place = self
        return self.run

    async def take_up(self, **changes: Any) -> bool:
        connections: Any = SimpleNamespace(client=SimpleNamespace(hub_key=self.hub.me.public_key))
        return await self.run.take_up(self.hub.welcome().model_copy(update=changes), connections)

    @property
    def run_id(self) -> str | None:
        """Id of the run whose base model decides the engine."""
        return self.run._engines.run_id

    async def open(self, welcome: Welcome, hub_key: bytes) -> RunShell:
        assert hub_key == self.hub.me.public_key
        if self.failures:
            raise self.failures.pop(0)
        directory = self._directory / str(len(self.sites))
        directory.mkdir()
        self.sites.append(Site(self.hub, self._swarm, directory))
        await self.sites[-1].shell.open(welcome.policy_version)
        return self.sites[-1].shell


@pytest.fixture
async def place(hub: Any, tmp_path: Path) -> AsyncIterator[Place]:
    swarm = await open_swarm(SwarmSettings(listen_host="127.0.0.1"))
    place = Place(hub, swarm, tmp_path)
    yield place
    if spool_writers():
        await place.run.close()
    for site in place.sites[-1:]:
        await site.fetcher.close()
    await swarm.close()


def spool_writers() -> int:
    return sum(task.get_name() == "spool writer" for task in asyncio.all_tasks())


async def test_a_run_starts_once_and_every_welcome_updates_it(
    hub: Any, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run = place.run
    assert (run.shell, place.run_id, run.token_rates) == (None, None, ())
    run.hear(TOTALS)
    await run.count()
    assert run.welcomed is None, "nothing is known before there is a run"
    assert await place.take_up()
    assert run.shell is place.sites[0].shell and place.run_id == hub.run_id
    run.hear(TOTALS)
    assert await place.take_up(policy_version=7)
    assert run.welcomed is not None and run.shell is place.sites[0].shell
    assert (run.welcomed.welcome.policy_version, run.welcomed.totals) == (7, TOTALS)
    assert len(place.sites) == 1
    assert [record.message for record in caplog.records if record.message.startswith("Connected to")] == [
        f"Connected to {hub.welcome().run_name} at {hub.url}."
    ]


async def test_another_run_ends_the_last_ones_shell(place: Place) -> None:
    await place.take_up()
    place.run.hear(TOTALS)
    assert await place.take_up(run_id="another")
    assert place.run.welcomed is not None and place.run.shell is place.sites[1].shell
    assert (place.run_id, place.run.welcomed.totals) == ("another", None)
    assert spool_writers() == 1


async def test_ending_a_run_closes_its_shell_and_keeps_its_figures(place: Place) -> None:
    await place.take_up()
    place.sites[0].shell.writer.put(spooled(1, 0))
    await place.run.close()
    assert spool_writers() == 0
    assert place.run.shell is not None and place.run.shell.writer.counts["sent"] == 1


async def test_counts_equal_the_spools(place: Place) -> None:
    await place.take_up()
    assert place.run.shell is not None and place.run.welcomed is not None
    place.run.shell.writer.put(spooled(1, 0))
    async with asyncio.timeout(PATIENCE_S):
        assert isinstance(await place.sites[0].inbox.get(), Spooled)
    assert place.run.shell.writer.counts["sent"] == 0
    await place.run.count()
    assert (place.run.shell.writer.counts["sent"], place.run.welcomed.counts_before["sent"]) == (1, 0)


async def test_a_patient_node_waits_for_disk_space(place: Place) -> None:
    place.failures = [StorageError("The disk is full.", code=DISK_FULL)]
    assert not await place.take_up()
    assert place.run.welcomed is None
    assert [trouble.code for trouble in place.troubles.now] == [TroubleCode.DISK_FULL]
    assert await place.take_up() and place.troubles.now == ()


async def test_permanent_errors_are_raised(place: Place) -> None:
    place.failures = [StorageError("The spool is damaged.")]
    with pytest.raises(StorageError, match="damaged"):
        await place.take_up()
    place.joined(patient=False)
    place.failures = [StorageError("The disk is full.", code=DISK_FULL)]
    with pytest.raises(StorageError, match="full"):
        await place.take_up()
    assert place.troubles.now == ()


async def test_before_admission_a_node_knows_its_last_run(hub: Any, place: Place) -> None:
    record = HubRecord(url=hub.url, hub_key_hex=hub.me.public_key.hex(), joined_at=1.0, run_id="before")
    place.joined(pinned=record)
    assert place.run_id == "before"
    assert await place.take_up()
    assert place.run_id == hub.run_id
