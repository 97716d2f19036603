from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from echo_hub.dashboard import picture_room
from echo_hub.dashboard.picture_room import Pictures
from tests.echo_hub.dashboard.test_share_picture import PICTURE


async def serve(pictures: Pictures, holder: str, gate: asyncio.Event | None = None) -> bytes:
    drawn = pictures.find(holder)
    if drawn is None:
        async with pictures.turn():
            if gate is not None:
                await gate.wait()
            drawn = pictures.find(holder) or await pictures.draw(holder, PICTURE)
    return drawn.body


async def test_a_picture_is_drawn_once_for_all_until_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures, loop = Pictures(), asyncio.get_running_loop()
    answers = await asyncio.gather(*(serve(pictures, "a") for _ in range(10)))
    assert pictures.num_drawn == 1 and len(set(answers)) == 1
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now + picture_room.GOOD_S + 1)
    await serve(pictures, "a")
    assert pictures.num_drawn == 2


async def test_the_number_of_waiting_requests_is_limited() -> None:
    pictures, gate = Pictures(), asyncio.Event()
    waiting = [asyncio.create_task(serve(pictures, str(i), gate)) for i in range(picture_room.MOST_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(web.HTTPServiceUnavailable):
        await serve(pictures, "one more", gate)
    gate.set()
    assert len(await asyncio.gather(*waiting)) == picture_room.MOST_WAITING


async def test_old_pictures_make_room_and_a_failure_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_room, "MOST_KEPT", 2)
    pictures = Pictures()
    for _ in range(picture_room.MOST_WAITING + 1):
        with pytest.raises(RuntimeError):
            async with pictures.turn():
                raise RuntimeError("x")
    for holder in "abcabc":
        await serve(pictures, holder)
    assert pictures.num_drawn == 6 and len(pictures._kept) == 2
