from __future__ import annotations

import asyncio

import pytest

from echo_hub.net import message_share
from echo_hub.net.message_share import MessageShare


async def test_messages_of_all_have_one_share_of_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    at = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: at)
    share, order = MessageShare(), list[str]()

    async def handle(name: str) -> None:
        nonlocal at
        for _ in range(4):
            order.append(name)
            at += message_share.ROUND_S / 2
            await share.rest()

    async def other() -> None:
        for _ in range(2):
            await asyncio.sleep(0)
            order.append("other")

    async with asyncio.TaskGroup() as tasks:
        for work in (handle("a"), handle("b"), other()):
            tasks.create_task(work)
    assert order == ["a", "a", "a", "b", "a", "b", "b", "other", "b", "other"]
