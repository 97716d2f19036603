from __future__ import annotations

import asyncio

import pytest

from echo_hub.net import send_queue
from echo_hub.net.send_queue import SendQueue


async def test_messages_go_before_pushes_and_pushes_for_others_before_the_rest() -> None:
    queue = SendQueue()
    queue.push(lambda: b"direct", relayed=False)
    queue.push(lambda: b"relayed", relayed=True)
    assert queue.put(b"first") and queue.put(b"second")
    assert [await queue.next() for _ in range(4)] == [b"first", b"second", b"relayed", b"direct"]


async def test_a_push_is_made_when_its_turn_comes_and_left_out_when_it_is_useless() -> None:
    queue, useful = SendQueue(), True
    for _ in range(2):
        queue.push(lambda: b"push" if useful else None, relayed=False)
    assert await queue.next() == b"push"
    useful = False
    waiting = asyncio.create_task(queue.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.put(b"message")
    assert await waiting == b"message"


async def test_a_full_queue_takes_no_more_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_queue, "MOST_MESSAGES", 2)
    queue = SendQueue()
    assert [queue.put(b"message") for _ in range(3)] == [True, True, False]
    await queue.next()
    assert queue.put(b"message")
