from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from echo_hub.net import send_queue
from echo_hub.net.send_queue import SendQueue


@dataclass
class Pushed:
    encoded: bytes = b"push"
    is_useful: bool = True

    def frame(self) -> bytes | None:
        return self.encoded if self.is_useful else None


async def test_messages_go_before_pushes_and_these_by_rank_and_age() -> None:
    queue = SendQueue()
    for name, rank in [(b"older", (-1, False)), (b"direct", (-2, True)), (b"own", (-2, False)), (b"more", (-2, True))]:
        assert queue.push(Pushed(name), rank)
    assert queue.put(b"first") and queue.put(b"second")
    taken = [await queue.next() for _ in range(6)]
    assert taken == [b"first", b"second", b"own", b"direct", b"more", b"older"]


async def test_a_push_is_made_at_its_turn_unless_it_is_useless() -> None:
    queue, pushed = SendQueue(), Pushed()
    for _ in range(2):
        queue.push(pushed, (0, False))
    assert await queue.next() == b"push"
    pushed.is_useful = False
    waiting = asyncio.create_task(queue.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.put(b"message")
    assert await waiting == b"message"


async def test_a_full_queue_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_queue, "MOST_MESSAGES", 2)
    monkeypatch.setattr(send_queue, "MOST_PUSHES", 1)
    queue = SendQueue()
    assert [queue.put(b"message") for _ in range(3)] == [True, True, False]
    assert [queue.push(Pushed(), (0, False)) for _ in range(2)] == [True, False]
    await queue.next()
    assert queue.put(b"message")


async def test_messages_that_wait_are_bounded_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_queue, "MOST_BYTES", 10)
    queue = SendQueue()
    assert [queue.put(bytes(size)) for size in (6, 4, 1)] == [True, True, False]
    await queue.next()
    assert queue.put(bytes(6)) and not queue.put(b"x")


async def test_ending_the_queue_wakes_its_taker_and_keeps_the_rest() -> None:
    queue = SendQueue()
    waiting = asyncio.create_task(queue.next())
    await asyncio.sleep(0)
    queue.end()
    assert await waiting is None
    queue.put(b"message")
    assert await queue.next() is None


async def test_a_queue_is_idle_while_its_taker_waits() -> None:
    queue = SendQueue()
    assert not queue.is_idle, "nobody takes"
    waiting = asyncio.create_task(queue.next())
    await asyncio.sleep(0)
    assert queue.is_idle
    queue.put(b"message")
    assert not queue.is_idle, "the next message has to wait for this one"
    assert await waiting == b"message"
    assert not queue.is_idle, "the message is being sent"
    waiting = asyncio.create_task(queue.next())
    await asyncio.sleep(0)
    queue.push(Pushed(), (0, False))
    assert not queue.is_idle
    await waiting
    queue.end()
    assert not queue.is_idle
