from __future__ import annotations

import asyncio

import pytest

from echo_hub.core.accounting.events import (
    Event,
    NodeConnected,
    NodeDisconnected,
    NodeReported,
    RolloutScored,
    StepDone,
)
from echo_hub.driving import event_queue as event_queue_module
from echo_hub.driving.event_queue import EventQueue


def taken(queue: EventQueue) -> list[Event]:
    found = []
    while events := queue.take():
        found += events
    return found


async def test_what_the_hub_has_found_out_goes_before_what_nodes_say() -> None:
    queue = EventQueue()
    of_nodes = [NodeConnected(node_id="a"), NodeDisconnected(node_id="a"), NodeConnected(node_id="b")]
    own = [RolloutScored(rollout_id="1-0", reward=1.0), StepDone(step=1, metrics={})]
    for event in (of_nodes[0], own[0], of_nodes[1], own[1], of_nodes[2]):
        await queue.put(event)
    assert taken(queue) == [*own, *of_nodes]


async def test_only_what_comes_by_the_thousand_is_taken_together() -> None:
    queue = EventQueue()
    told = [NodeReported(node_id=name, capacity=1, policy_version=0) for name in "abcd"]
    events = [told[0], told[1], NodeDisconnected(node_id="a"), told[2], told[3]]
    for event in events:
        await queue.put(event)
    assert queue.take(3) == events[:2]
    assert queue.take(3) == events[2:3], "has a turn of its own"
    assert queue.take(1) == events[3:4]


async def test_a_taker_waits_for_the_next() -> None:
    queue = EventQueue()
    assert queue.take() == []
    waiting = asyncio.create_task(queue.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    await queue.put(NodeConnected(node_id="a"))
    await waiting
    assert len(taken(queue)) == 1


async def test_nodes_wait_while_it_is_full_and_verdicts_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_queue_module, "QUEUED_EVENTS", 1)
    queue = EventQueue()
    await queue.put(NodeConnected(node_id="a"))
    waiting = asyncio.create_task(queue.put(NodeConnected(node_id="b")))
    await asyncio.sleep(0)
    assert not waiting.done()
    await queue.put(RolloutScored(rollout_id="1-0", reward=1.0))
    queue.take()
    await asyncio.sleep(0)
    assert not waiting.done(), "there is no more room than before"
    queue.take()
    await waiting
    assert taken(queue) == [NodeConnected(node_id="b")]


async def test_at_its_end_nobody_waits_and_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_queue_module, "QUEUED_EVENTS", 1)
    queue = EventQueue()
    await queue.put(NodeConnected(node_id="a"))
    waiting = asyncio.create_task(queue.put(NodeConnected(node_id="b")))
    await asyncio.sleep(0)
    queue.end()
    await waiting
    await queue.put(NodeConnected(node_id="c"))
    assert taken(queue) == []


async def test_what_is_handled_alone_is_not_waited_with() -> None:
    queue = EventQueue()
    await queue.put(RolloutScored(rollout_id="1-0", reward=1.0))
    waiting = asyncio.create_task(queue.wait_for_others())
    await asyncio.sleep(0)
    assert queue and not waiting.done()
    await queue.put(NodeConnected(node_id="a"))
    await waiting
    taken(queue)
    again = asyncio.create_task(queue.wait_for_others())
    await asyncio.sleep(0)
    assert not queue and not again.done()
    again.cancel()


async def test_what_nodes_say_can_be_left_where_it_is() -> None:
    queue = EventQueue()
    waiting = asyncio.create_task(queue.wait_for_own())
    await queue.put(NodeConnected(node_id="a"))
    await asyncio.sleep(0)
    assert not waiting.done() and queue.take(of_nodes=False) == [], "only a node has said something"
    await queue.put(RolloutScored(rollout_id="1-0", reward=1.0))
    await waiting
    assert queue.take(of_nodes=False) == [RolloutScored(rollout_id="1-0", reward=1.0)]
    assert queue.take(of_nodes=False) == [] and queue
    waiting = asyncio.create_task(queue.wait_for_own())
    await asyncio.sleep(0)
    assert not waiting.done(), "it was taken"
    waiting.cancel()
    assert taken(queue) == [NodeConnected(node_id="a")]
