from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import event

from echo_hub.store.async_store import AsyncStore
from echo_hub.store.store import Store
from echo_shared.errors import StorageError
from echo_shared.room import Room
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
            await store.set_run_meta(key, "1")
            assert key in await store.run_meta()
    assert len(writers) == len(readers) == 1 and writers.isdisjoint(readers)
    assert threading.current_thread().name not in writers | readers


async def test_a_read_waits_for_no_write(tmp_path: Path) -> None:
    writes, may_commit = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        writes.set()
        assert may_commit.wait(60)

    async with opened(tmp_path) as store, asyncio.TaskGroup() as tasks:
        await store.set_run_meta("a", "1")
        event.listen(store.store.engine, "commit", hold, once=True)
        tasks.create_task(store.set_run_meta("a", "2"))
        await asyncio.to_thread(writes.wait, 60)
        assert await store.run_meta() == {"a": "1"}
        may_commit.set()


async def test_what_a_full_disk_does_not_take_waits_and_all_behind_it(small_disk: SmallDisk) -> None:
    values = ["x" * 2_000_000, "y"]
    waits = threading.Event()
    room = Room(full=lambda said: waits.set())
    async with opened(small_disk.directory, room) as store, asyncio.TaskGroup() as tasks:
        small_disk.fill()
        writes = [tasks.create_task(store.set_run_meta("a", value)) for value in values]
        assert await asyncio.to_thread(waits.wait, 60)
        assert "full" in store.room.lacks
        assert not any(write.done() for write in writes)
        assert await store.run_meta() == {}, "it may be read meanwhile"
        small_disk.empty()
        await writes[1]
        assert writes[0].done() and await store.run_meta() == {"a": "y"}, "in order"
        assert not store.room.lacks


async def test_who_closes_it_waits_for_no_room(small_disk: SmallDisk) -> None:
    waits = threading.Event()
    async with opened(small_disk.directory, Room(full=lambda said: waits.set())) as store:
        small_disk.fill()
        write = asyncio.create_task(store.set_run_meta("a", "x" * 2_000_000))
        assert await asyncio.to_thread(waits.wait, 60)
    with pytest.raises(StorageError, match="full"):
        await write


def test_each_method_is_the_stores_of_that_name() -> None:
    for name, method in inspect.getmembers(AsyncStore, inspect.iscoroutinefunction):
        if name not in ("write", "read"):
            mine, theirs = (list(inspect.signature(each).parameters) for each in (method, getattr(Store, name)))
            assert mine == theirs, name
