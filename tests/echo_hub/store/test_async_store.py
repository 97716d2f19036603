from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event

from echo_hub.store import training
from echo_hub.store.async_store import AsyncStore, ReadAhead
from echo_hub.store.database import read_meta, write_meta
from echo_hub.store.reading import read_receipts
from echo_hub.store.reports import read_accounting
from echo_hub.store.store import Store
from echo_shared.errors import StorageError
from echo_shared.files.full_disk import Room
from echo_shared.wire.messages import ReceiptState
from tests.small_disk import SmallDisk


@asynccontextmanager
async def opened(directory: Path, room: Room | None = None) -> AsyncIterator[AsyncStore]:
    store = AsyncStore(Store.open(f"sqlite:///{directory / 'echo.db'}"), room)
    yield store
    await store.close()


async def test_one_thread_writes_and_another_reads(tmp_path: Path) -> None:
    writers, readers = set[str](), set[str]()
    async with opened(tmp_path) as store:
        event.listen(store.store.engine, "commit", lambda _: writers.add(threading.current_thread().name))
        event.listen(store.store.engine, "rollback", lambda _: readers.add(threading.current_thread().name))
        for key in ("a", "b"):
            await store.write(write_meta, key, "1")
            assert key in await store.read(read_meta)
    assert len(writers) == len(readers) == 1 and writers.isdisjoint(readers)
    assert threading.current_thread().name not in writers | readers


async def test_a_read_waits_for_no_write(tmp_path: Path) -> None:
    writes, may_commit = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        writes.set()
        assert may_commit.wait(60)

    async with opened(tmp_path) as store, asyncio.TaskGroup() as tasks:
        await store.write(write_meta, "a", "1")
        event.listen(store.store.engine, "commit", hold, once=True)
        tasks.create_task(store.write(write_meta, "a", "2"))
        await asyncio.to_thread(writes.wait, 60)
        assert await store.read(read_meta) == {"a": "1"}
        may_commit.set()


async def test_a_full_disk_delays_a_write_and_all_later_ones(small_disk: SmallDisk) -> None:
    values = ["x" * 2_000_000, "y"]
    waits = threading.Event()
    room = Room(tell=lambda said: waits.set())
    async with opened(small_disk.directory, room) as store, asyncio.TaskGroup() as tasks:
        small_disk.fill()
        writes = [tasks.create_task(store.write(write_meta, "a", value)) for value in values]
        assert await asyncio.to_thread(waits.wait, 60)
        assert "full" in store.room.lacks
        assert not any(write.done() for write in writes)
        assert await store.read(read_meta) == {}, "reads work while writes wait"
        small_disk.empty()
        await writes[1]
        assert writes[0].done() and await store.read(read_meta) == {"a": "y"}, "in order"
        assert not store.room.lacks


async def test_close_does_not_wait_for_disk_space(small_disk: SmallDisk) -> None:
    waits = threading.Event()
    async with opened(small_disk.directory, Room(tell=lambda said: waits.set())) as store:
        small_disk.fill()
        write = asyncio.create_task(store.write(write_meta, "a", "x" * 2_000_000))
        assert await asyncio.to_thread(waits.wait, 60)
    with pytest.raises(StorageError, match="full"):
        await write


async def test_close_leaves_no_connection_though_a_write_comes_meanwhile(tmp_path: Path) -> None:
    writes, may_commit = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        writes.set()
        assert may_commit.wait(60)

    store = AsyncStore(Store.open(f"sqlite:///{tmp_path / 'echo.db'}"))
    event.listen(store.store.engine, "commit", hold, once=True)
    first = asyncio.create_task(store.write(write_meta, "a", "1"))
    await asyncio.to_thread(writes.wait, 60)
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0.1)
    late = asyncio.create_task(store.write(write_meta, "a", "2"))
    await asyncio.sleep(0)
    may_commit.set()
    await asyncio.gather(first, closing)
    await asyncio.wait([late])
    assert isinstance(late.exception(), RuntimeError | None)
    assert store.store.engine.pool.checkedin() == 0  # type: ignore[attr-defined]


async def test_a_large_step_is_counted_while_others_write(
    tmp_path: Path, records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "COUNTED_AT_ONCE", 4)
    async with opened(tmp_path) as store:
        await store.apply(records.large_step(1, num_groups=10), 1.0)
        seen = []
        for number in range(3):
            await store.write(write_meta, str(number), "")
            seen.append(store.store.read(read_accounting).trained)
        assert seen[0] <= seen[1] <= seen[2] < 20, "each write waits for at most a part of the step"
        told = await store.read_counted(read_receipts, "n0", ["10-0", "18-1"])
        assert {receipt.state for receipt in told} == {ReceiptState.TRAINED}
        assert store.store.read(read_accounting).trained == 20


async def test_close_finishes_counting_a_large_step(
    tmp_path: Path, records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "COUNTED_AT_ONCE", 4)
    async with opened(tmp_path) as store:
        await store.apply(records.large_step(1, num_groups=10), 1.0)
        assert store.store.read(read_accounting).trained < 20
    after = Store.open(f"sqlite:///{tmp_path / 'echo.db'}", beside_hub=True)
    assert after.read(read_accounting).trained == 20
    after.close()


async def test_a_step_that_cannot_be_counted_is_reported(
    tmp_path: Path, records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "COUNTED_AT_ONCE", 4)
    async with opened(tmp_path) as store:
        with store.store.engine.begin() as connection:
            connection.exec_driver_sql("DROP TABLE credit")
        await store.apply(records.large_step(1, num_groups=10), 1.0)
        with pytest.raises(StorageError, match="credit"):
            await store.counted()
        with pytest.raises(StorageError, match="credit"):
            await store.apply([], 2.0)


@asynccontextmanager
async def waiting_for_room(small_disk: SmallDisk, records: Any) -> AsyncIterator[AsyncStore]:
    """Yield a store that waits because its disk is full, in the middle of counting a step of twenty rollouts."""
    waits = threading.Event()
    async with opened(small_disk.directory, Room(tell=lambda said: waits.set())) as store:
        store.store.apply(records.large_step(1, num_groups=10), 1.0)
        with store.store.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        small_disk.fill()
        await store.apply([], 2.0)
        assert await asyncio.to_thread(waits.wait, 60)
        assert store.store.read(read_accounting).trained < 20 and store.store.read(read_accounting).balanced
        yield store


async def test_a_large_step_is_counted_once_a_full_disk_has_room(
    small_disk: SmallDisk, records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "COUNTED_AT_ONCE", 4)
    async with waiting_for_room(small_disk, records) as store:
        small_disk.empty()
        await store.counted()
        assert store.store.read(read_accounting).trained == 20 and store.store.read(read_accounting).balanced


async def test_after_a_full_disk_the_next_start_finishes_counting(
    small_disk: SmallDisk, records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "COUNTED_AT_ONCE", 4)
    async with waiting_for_room(small_disk, records):
        pass
    small_disk.empty()
    again = Store.open(f"sqlite:///{small_disk.directory / 'echo.db'}")
    assert again.read(read_accounting).trained == 20 and again.read(read_accounting).balanced
    again.close()


async def test_a_commit_reads_ahead_for_the_next_equal_read(tmp_path: Path) -> None:
    threads: list[str] = []

    def found(connection: Connection, keys: Collection[str]) -> dict[str, str]:
        threads.append(threading.current_thread().name.partition("_")[0])
        return {key: value for key, value in read_meta(connection).items() if key in keys}

    async with opened(tmp_path) as store:
        await store.write(write_meta, "a", "1")
        await store.apply((), 0.0, ahead=[ReadAhead(found, {"a", "b"})])
        assert await store.read(found, {"b"}) == {}, "another question"
        assert await store.read(found, {"b", "a"}) == {"a": "1"}
        assert threads == ["store-writer", "store-reader"]
        assert await store.read(found, {"a", "b"}) == {"a": "1"}
        assert threads[2:] == ["store-reader"], "a result is taken once"
        await store.apply((), 0.0, ahead=[ReadAhead(found, {"a"})])
        await store.write(write_meta, "a", "2")
        assert await store.read(found, {"a"}) == {"a": "2"}, "a later write drops what was read ahead"


async def test_a_write_that_began_meanwhile_drops_what_was_read_ahead(tmp_path: Path) -> None:
    calls: list[Collection[str]] = []

    def found(connection: Connection, keys: Collection[str]) -> int:
        calls.append(keys)
        return len(calls)

    async with opened(tmp_path) as store:
        commit = asyncio.create_task(store.apply((), 0.0, ahead=[ReadAhead(found, {"a"})]))
        await asyncio.sleep(0)
        await asyncio.gather(commit, store.on_writer(list))
        assert await store.read(found, {"a"}) == 2


async def test_a_query_that_fails_ahead_fails_where_it_is_asked(tmp_path: Path) -> None:
    def fails(connection: Connection, keys: Collection[str]) -> None:
        raise StorageError("The rows cannot be read.", got=threading.current_thread().name)

    async with opened(tmp_path) as store:
        await store.apply((), 0.0, ahead=[ReadAhead(fails, {"a"})])
        with pytest.raises(StorageError, match="store-reader"):
            await store.read(fails, {"a"})
