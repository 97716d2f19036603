from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from echo_hub.config.serving_sections import DisseminationConfig
from echo_hub.core.accounting.events import VersionPublished, VersionUnusable
from echo_hub.core.training import KEPT_VERSIONS
from echo_hub.distribution.publishing import Publishing
from echo_hub.driving.event_queue import EventQueue
from echo_hub.net.broadcaster import Broadcaster
from echo_hub.net.distributor import Distributor
from echo_hub.net.host_memory import HostMemory
from echo_hub.net.live_nodes import LiveNodes
from echo_hub.net.publisher import Publisher
from echo_hub.net.send_queue import DeferredMessage, Rank
from echo_hub.net.tracker import Tracker
from echo_hub.run.base_files import resolve_base
from echo_hub.run.directory import RunDirectory
from echo_hub.spread.holdings import Arrival, Release
from echo_shared.errors import RefusedError
from echo_shared.files.full_disk import Room
from echo_shared.signing import key_file
from echo_shared.swarm import Swarm, SwarmSettings, open_swarm
from echo_shared.wire.messages import FromHub, RefusalCode
from tests.small_disk import SmallDisk


class Nobody:
    """Stand-in for the connections to nodes, while no node is connected."""

    def send(self, node_id: str, message: FromHub) -> bool:
        return False

    def push(self, node_id: str, message: DeferredMessage, rank: Rank) -> bool:
        return False

    def dismiss(self, node_id: str, code: RefusalCode, what: str) -> None: ...


class Run:
    def __init__(self, directory: RunDirectory, swarm: Swarm) -> None:
        self.directory = directory
        me = key_file.load_or_create(directory.key)
        publisher = Publisher(
            directory.root, "r", me, swarm=swarm, tracker=Tracker(me), memory=HostMemory(enabled=False)
        )
        self.distributor = Distributor(
            settings=DisseminationConfig(),
            publisher=publisher,
            broadcaster=Broadcaster(Nobody()),
            connections=Nobody(),
            books=self,
            live=LiveNodes(),
        )
        self.queue = EventQueue()
        self.waits = asyncio.Event()
        self.room = Room(retry_s=0.0, tell=lambda said: self.waits.set())
        self.publishing = Publishing(
            distributor=self.distributor, directory=directory, queue=self.queue, room=self.room
        )

    async def record(self, news: Sequence[Release | Arrival]) -> None: ...

    async def reported(self) -> VersionPublished | VersionUnusable:
        while not (events := self.queue.take()):
            await self.queue.wait()
        (event,) = events
        assert isinstance(event, VersionPublished | VersionUnusable)
        return event

    def export(self, version: int, value: float | None = None) -> None:
        directory = self.directory.adapter(version)
        directory.mkdir(parents=True)
        (directory / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
        save_file(
            {"lora": np.full((8, 8), version if value is None else value, np.float32)},
            directory / "adapter_model.safetensors",
        )


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    swarm = await open_swarm(SwarmSettings(listen_host="127.0.0.1"))
    yield Run(RunDirectory(tmp_path), swarm)
    await swarm.close()


async def test_versions_go_out_in_order_and_the_coordinator_hears_of_each(run: Run) -> None:
    await run.publishing.reopen(resolve_base("builtin:tiny"), base_source=None, published_version=0, banned=())
    for version in (1, 2):
        run.export(version)
        run.publishing.submit(version)
    working = asyncio.create_task(run.publishing.run())
    async with asyncio.timeout(60):
        assert [(await run.reported()).policy_version for _ in range(2)] == [1, 2]
    assert run.distributor.has(1) and run.distributor.has(2)
    working.cancel()
    await asyncio.wait([working])


async def test_a_version_with_nonfinite_weights_is_skipped(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    await run.publishing.reopen(resolve_base("builtin:tiny"), base_source=None, published_version=0, banned=())
    for version, value in ((1, 1.0), (2, float("nan")), (3, float("-inf")), (4, 4.0), (5, 5.0)):
        run.export(version, value)
    (run.directory.adapter(4) / "adapter_model.safetensors").write_bytes(b"torn")
    for version in range(1, 6):
        run.publishing.submit(version)
    working = asyncio.create_task(run.publishing.run())
    reason = "1 tensors of its adapter hold values that are not finite, the first lora"
    async with asyncio.timeout(60):
        told = [await run.reported() for _ in range(5)]
    assert told[:3] == [
        VersionPublished(policy_version=1),
        VersionUnusable(policy_version=2, reason=reason),
        VersionUnusable(policy_version=3, reason=reason),
    ]
    assert isinstance(told[3], VersionUnusable) and "adapter_model.safetensors" in told[3].reason
    assert told[4] == VersionPublished(policy_version=5)
    assert [version for version in range(1, 6) if run.distributor.has(version)] == [1, 5]
    assert "version 2 is not published" in caplog.text
    working.cancel()
    await asyncio.wait([working])


async def test_a_version_that_a_full_disk_does_not_take_goes_out_once_there_is_room(small_disk: SmallDisk) -> None:
    swarm = await open_swarm(SwarmSettings(listen_host="127.0.0.1"))
    run = Run(RunDirectory(small_disk.directory), swarm)
    await run.publishing.reopen(resolve_base("builtin:tiny"), base_source=None, published_version=0, banned=())
    run.export(1)
    small_disk.fill()
    run.publishing.submit(1)
    working = asyncio.create_task(run.publishing.run())
    async with asyncio.timeout(60):
        await run.waits.wait()
        assert not run.distributor.has(1)
        small_disk.empty()
        assert (await run.reported()).policy_version == 1
    assert run.distributor.has(1) and not run.room.lacks
    working.cancel()
    await asyncio.wait([working])
    await swarm.close()


async def test_after_a_restart_the_newest_version_is_served_and_bans_hold(run: Run) -> None:
    run.export(3)
    await run.publishing.reopen(resolve_base("builtin:tiny"), base_source=None, published_version=3, banned={"bad"})
    assert run.distributor.has(0) and run.distributor.has(3) and not run.distributor.has(2)
    with pytest.raises(RefusedError):
        run.distributor.admit("bad")
    run.distributor.admit("good")


async def test_a_held_version_can_be_published_again_for_a_tenant(run: Run) -> None:
    newest = KEPT_VERSIONS + 1
    await run.publishing.reopen(resolve_base("builtin:tiny"), base_source=None, published_version=0, banned=())
    for version in range(1, newest + 1):
        run.export(version)
        await run.distributor.publish(version, run.directory.adapter(version))
    assert not run.distributor.has(1)
    run.publishing.hold_for_tenants({1})
    for version in (1, newest):
        await run.publishing.publish_for_tenant(version, run.directory.adapter(version))
    assert run.distributor.has(1) and run.distributor.has(newest)


async def test_evaluations_can_use_an_older_version_and_the_base(run: Run) -> None:
    run.export(1)
    await run.publishing.reopen(resolve_base("builtin:tiny"), base_source=None, published_version=0, banned=())
    await run.publishing.keep_for_evaluation(0)
    assert not run.distributor.has(1)
    await run.publishing.keep_for_evaluation(1)
    assert run.distributor.has(1)
