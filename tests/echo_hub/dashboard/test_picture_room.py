from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from echo_hub.dashboard import picture_room
from echo_hub.dashboard.picture_room import Pictures
from echo_hub.dashboard.share_picture import SharePicture
from tests.echo_hub.dashboard.test_share_picture import PICTURE


async def made() -> SharePicture:
    return PICTURE


async def test_a_picture_is_drawn_once_for_all_until_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures, loop = Pictures(), asyncio.get_running_loop()
    request = make_mocked_request("GET", "/")
    answers = await asyncio.gather(*(pictures.serve(request, "a", made) for _ in range(10)))
    assert pictures.num_drawn == 1 and len({answer.body for answer in answers}) == 1
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now + picture_room.GOOD_S + 1)
    await pictures.serve(request, "a", made)
    assert pictures.num_drawn == 2


async def test_the_number_of_waiting_requests_is_limited() -> None:
    pictures, gate = Pictures(), asyncio.Event()

    async def later() -> SharePicture:
        await gate.wait()
        return PICTURE

    request = make_mocked_request("GET", "/")
    waiting = [asyncio.create_task(pictures.serve(request, str(i), later)) for i in range(picture_room.MOST_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(web.HTTPServiceUnavailable):
        await pictures.serve(request, "one more", later)
    gate.set()
    assert len(await asyncio.gather(*waiting)) == picture_room.MOST_WAITING


async def test_old_pictures_make_room_and_a_failure_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_room, "MOST_KEPT", 2)
    pictures, request = Pictures(), make_mocked_request("GET", "/")

    async def fails() -> Any:
        raise RuntimeError("x")

    for _ in range(picture_room.MOST_WAITING + 1):
        with pytest.raises(RuntimeError):
            await pictures.serve(request, "a", fails)
    for holder in "abcabc":
        await pictures.serve(request, holder, made)
    assert pictures.num_drawn == 6 and len(pictures._kept) == 2
