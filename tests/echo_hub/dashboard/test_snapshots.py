from __future__ import annotations

import asyncio
from typing import Any

import pytest

from echo_hub.dashboard.snapshots import LEAST_REST, REST, Snapshots, rest_s


async def test_all_viewers_share_one_snapshot(source: Any) -> None:
    snapshots = Snapshots(source, min_interval_s=60)
    taken = await asyncio.gather(*(snapshots.get() for _ in range(50)))
    assert all(snapshot is taken[0] for snapshot in taken)
    assert source.num_reads == 1


async def test_without_a_minimum_every_look_is_fresh(source: Any) -> None:
    snapshots = Snapshots(source, min_interval_s=0)
    assert (await snapshots.get()).run.trained_step == 37
    source.advance()
    assert (await snapshots.get()).run.trained_step == 38


async def test_a_burst_of_changes_is_one_snapshot_for_all_viewers(source: Any) -> None:
    snapshots = Snapshots(source, min_interval_s=0.05)
    first = await snapshots.after(-1)
    viewers = [asyncio.create_task(snapshots.after(first.change)) for _ in range(20)]
    for _ in range(10):
        source.advance()
    seen = await asyncio.gather(*viewers)
    assert {snapshot.run.trained_step for snapshot in seen} == {47}
    assert source.num_reads == 2


@pytest.mark.parametrize(
    ("waited_s", "processor_s", "rests_s"), [(3.0, 3.0, LEAST_REST * 3.0), (3.0, 0.01, REST * 0.01)]
)
async def test_a_slow_store_is_read_rarely(
    source: Any, monkeypatch: pytest.MonkeyPatch, waited_s: float, processor_s: float, rests_s: float
) -> None:
    loop = asyncio.get_running_loop()
    began_at, passed = loop.time(), [0.0]
    monkeypatch.setattr(loop, "time", lambda: began_at + passed[0])
    read = source.picture
    source.processor_s = processor_s

    async def slow() -> Any:
        passed[0] += waited_s
        return await read()

    monkeypatch.setattr(source, "picture", slow)
    snapshots = Snapshots(source, min_interval_s=0.01)
    first = await snapshots.get()
    assert first.took_s == pytest.approx(waited_s)
    passed[0] += rests_s - 0.05
    assert await snapshots.get() is first
    passed[0] += 0.1
    assert await snapshots.get() is not first


async def test_after_waits_for_a_change(source: Any) -> None:
    snapshots = Snapshots(source, min_interval_s=0)
    first = await snapshots.after(-1)
    waiting = asyncio.create_task(snapshots.after(first.change))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    source.advance()
    assert (await waiting).run.trained_step == 38


def test_fast_reads_take_a_fortieth_of_the_time_and_slow_ones_a_tenth() -> None:
    assert rest_s(0.01) == pytest.approx(0.4)
    assert rest_s(0.1) == pytest.approx(1.5), "no page gets older by this"
    assert rest_s(1.0) == pytest.approx(9.0)
