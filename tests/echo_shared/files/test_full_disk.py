from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from echo_shared.errors import DATABASE_AWAY, DISK_FULL, StorageError
from echo_shared.files.full_disk import Room

FULL = StorageError("The disk is full.", got="No space left on device", code=DISK_FULL)


def failing(times: int, error: Exception = FULL, seen: Callable[[], object] = lambda: None) -> Callable[[], str]:
    left = [error] * times

    def write() -> str:
        seen()
        if left:
            raise left.pop()
        return "written"

    return write


def test_a_write_is_repeated_until_it_fits() -> None:
    told, said = list[str](), list[str]()
    room = Room(retry_s=0.0, tell=told.append)
    assert room.until(failing(3, seen=lambda: said.append(room.lacks))) == "written"
    assert said == ["", *["No space left on device"] * 3]
    assert room.lacks == ""
    assert told == ["No space left on device", ""], "once each"


async def test_an_asynchronous_write_is_repeated_until_it_fits() -> None:
    room, write = Room(retry_s=0.0), failing(3)

    async def later() -> str:
        return write()

    assert await room.until_done(later) == "written"
    assert room.lacks == ""


async def test_each_kind_of_failure_has_a_separate_room() -> None:
    away = StorageError("The database is away.", got="connection refused", code=DATABASE_AWAY)
    server, disk = Room(code=DATABASE_AWAY, retry_s=0.0), Room(retry_s=0.0)
    assert server.until(failing(2, away)) == "written"
    with pytest.raises(StorageError, match="is away"):
        disk.until(failing(1, away))
    with pytest.raises(StorageError, match="is full"):
        server.until(failing(1))


@pytest.mark.parametrize("error", [StorageError("The disk is broken."), OSError("what"), KeyError("x")])
async def test_other_errors_are_not_retried(error: Exception) -> None:
    room, write = Room(retry_s=0.0), failing(1, error)

    async def later() -> str:
        return write()

    with pytest.raises(type(error)):
        room.until(failing(1, error))
    with pytest.raises(type(error)):
        await room.until_done(later)
    assert room.lacks == ""


async def test_giving_up_ends_all_waiting_writes() -> None:
    room, begun = Room(retry_s=3_600.0), threading.Event()
    waiting = asyncio.create_task(asyncio.to_thread(room.until, failing(2, seen=begun.set)))
    await asyncio.to_thread(begun.wait, 60)
    room.give_up()
    with pytest.raises(StorageError):
        await waiting

    async def later() -> str:
        raise FULL

    with pytest.raises(StorageError):
        await room.until_done(later)
    assert room.lacks == ""


async def test_a_room_is_full_as_long_as_one_write_waits() -> None:
    room, begun = Room(retry_s=0.0), threading.Event()

    def long() -> str:
        begun.set()
        raise FULL

    waiting = asyncio.create_task(asyncio.to_thread(room.until, long))
    await asyncio.to_thread(begun.wait, 60)
    assert room.until(failing(2)) == "written"
    assert room.lacks == "No space left on device"
    room.give_up()
    with pytest.raises(StorageError):
        await waiting
    assert room.lacks == ""


def test_another_process_waits_too() -> None:
    told = list[str]()
    room = Room(retry_s=0.0, tell=told.append)
    room.elsewhere("the learner", "")
    assert told == [], "no wait was needed"
    room.elsewhere("the learner", "No space left for a checkpoint")
    assert room.lacks == "No space left for a checkpoint"
    assert room.until(failing(1)) == "written"
    assert room.lacks, "the learner's write still waits"
    room.elsewhere("the learner", "")
    assert room.lacks == "" and told == ["No space left for a checkpoint", ""]
