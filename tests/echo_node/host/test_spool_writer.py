import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_node.core.effects import SpoolLease, SpoolRollout
from echo_node.core.events import Spooled, SpoolFailed
from echo_node.core.troubles import TroubleCode
from echo_node.host.spool import Spool
from echo_node.host.spool_writer import SpoolWriter
from echo_node.host.trouble_log import TroubleLog
from echo_shared.wire.messages import FinishReason, Rollout
from tests.small_disk import mounted, needs_mounts


def effect(index: int, length: int = 3) -> SpoolRollout:
    rollout = Rollout(
        rollout_id=f"1-{index}",
        lease_id=1,
        group_id=1,
        index=index,
        policy_version_start=0,
        policy_version_end=0,
        completion_ids=np.zeros(length, np.int32),
        behavior_logprobs=np.zeros(length, np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=0.0,
    )
    return SpoolRollout(rollout=rollout)


@pytest.fixture
def spool(tmp_path: Path) -> Any:
    spool = Spool(tmp_path / "spool.db")
    spool.open()
    spool.begin_run("run")
    yield spool
    spool.close()


async def test_rollouts_are_reported_once_they_are_durable(spool: Spool) -> None:
    told: asyncio.Queue[Spooled | SpoolFailed] = asyncio.Queue()
    troubles = TroubleLog()
    writer = SpoolWriter(spool, told, troubles)
    task = asyncio.create_task(writer.run())
    writer.put(SpoolLease(lease_id=1, indices=(0, 1)))
    writer.put(effect(0))
    writer.put(effect(1))
    names: list[str] = []
    while len(names) < 2:
        event = await told.get()
        assert isinstance(event, Spooled)
        names += [rollout.rollout_id for rollout in event.rollouts]
        assert set(names) <= set(spool.unacked_ids())
    assert names == ["1-0", "1-1"]
    await writer.refresh()
    assert writer.counts["sent"] == 2
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit on file sizes")
async def test_a_full_disk_is_reported_and_retried(spool: Spool) -> None:
    import resource

    told: asyncio.Queue[Spooled | SpoolFailed] = asyncio.Queue()
    troubles = TroubleLog()
    writer = SpoolWriter(spool, told, troubles)
    task = asyncio.create_task(writer.run())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        writer.put(effect(0, length=20_000))
        failed = await told.get()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(failed, SpoolFailed)
    assert "cannot be written" in troubles.now[0].sentence
    writer.put(effect(1))
    writer.retry_now()
    names: list[str] = []
    while len(names) < 2:
        event = await told.get()
        if isinstance(event, Spooled):
            names += [rollout.rollout_id for rollout in event.rollouts]
        else:
            writer.retry_now()
    assert names == ["1-0", "1-1"]
    assert troubles.now == ()
    task.cancel()
    await asyncio.wait({task})


@needs_mounts
async def test_a_disk_without_room_is_reported_once_and_nothing_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with mounted(tmp_path / "disk", 512 * 1024) as disk:
        spool, troubles = Spool(disk.directory / "spool.db"), TroubleLog()
        spool.open()
        spool.begin_run("run")
        told: asyncio.Queue[Spooled | SpoolFailed] = asyncio.Queue()
        writer = SpoolWriter(spool, told, troubles)
        task = asyncio.create_task(writer.run())
        disk.fill()
        writer.put(effect(0, length=20_000))
        for _ in range(4):
            assert isinstance(await told.get(), SpoolFailed)
            writer.retry_now()
        assert [trouble.code for trouble in troubles.now] == [TroubleCode.DISK_FULL]
        disk.empty()
        writer.retry_now()
        while isinstance(event := await told.get(), SpoolFailed):
            writer.retry_now()
        assert [rollout.rollout_id for rollout in event.rollouts] == ["1-0"] == spool.unacked_ids()
        task.cancel()
        await asyncio.wait({task})
        spool.close()
    begun, over = [record.message for record in caplog.records]
    assert begun.startswith("The disk is full. (")
    assert begun.endswith(f"Free some space on the disk of {disk.directory}.")
    assert over == "The disk has free space again: the node resumes."


async def test_finish_writes_the_remaining_entries(spool: Spool) -> None:
    writer = SpoolWriter(spool, asyncio.Queue[Any](), TroubleLog())
    writer.put(effect(7))
    writer.finish()
    assert spool.unacked_ids() == ["1-7"]
