from __future__ import annotations

import asyncio

import pytest

from echo_hub.core.events import Event, NodeConnected, NodeDisconnected, NodeReported, RolloutScored, StepDone
from echo_hub.serving import inbox as inbox_module
from echo_hub.serving.inbox import Inbox


def taken(inbox: Inbox) -> list[Event]:
    found = []
    while events := inbox.take():
        found += events
    return found


async def test_the_hubs_own_events_come_before_node_messages() -> None:
    inbox = Inbox()
    of_nodes = [NodeConnected(node_id="a"), NodeDisconnected(node_id="a"), NodeConnected(node_id="b")]
    own = [RolloutScored(rollout_id="1-0", reward=1.0), StepDone(step=1, metrics={})]
    for event in (of_nodes[0], own[0], of_nodes[1], own[1], of_nodes[2]):
        await inbox.put(event)
    assert taken(inbox) == [*own, *of_nodes]


async def test_only_frequent_events_are_taken_together() -> None:
    inbox = Inbox()
    told = [NodeReported(node_id=name, capacity=1, policy_version=0) for name in "abcd"]
    events = [told[0], told[1], NodeDisconnected(node_id="a"), told[2], told[3]]
    for event in events:
        await inbox.put(event)
    assert inbox.take(3) == events[:2]
    assert inbox.take(3) == events[2:3], "this event has its own turn"
    assert inbox.take(1) == events[3:4]


async def test_a_taker_waits_for_the_next() -> None:
    inbox = Inbox()
    assert inbox.take() == []
    waiting = asyncio.create_task(inbox.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    await inbox.put(NodeConnected(node_id="a"))
    await waiting
    assert len(taken(inbox)) == 1


async def test_a_full_inbox_blocks_nodes_but_no_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "INBOX_EVENTS", 1)
    inbox = Inbox()
    await inbox.put(NodeConnected(node_id="a"))
    waiting = asyncio.create_task(inbox.put(NodeConnected(node_id="b")))
    await asyncio.sleep(0)
    assert not waiting.done()
    await inbox.put(RolloutScored(rollout_id="1-0", reward=1.0))
    inbox.take()
    await asyncio.sleep(0)
    assert not waiting.done(), "no space was freed"
    inbox.take()
    await waiting
    assert taken(inbox) == [NodeConnected(node_id="b")]


async def test_a_closed_inbox_blocks_no_one_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "INBOX_EVENTS", 1)
    inbox = Inbox()
    await inbox.put(NodeConnected(node_id="a"))
    waiting = asyncio.create_task(inbox.put(NodeConnected(node_id="b")))
    await asyncio.sleep(0)
    inbox.end()
    await waiting
    await inbox.put(NodeConnected(node_id="c"))
    assert taken(inbox) == []


async def test_an_event_handled_alone_is_taken_at_once() -> None:
    inbox = Inbox()
    await inbox.put(RolloutScored(rollout_id="1-0", reward=1.0))
    waiting = asyncio.create_task(inbox.wait_for_others())
    await asyncio.sleep(0)
    assert inbox and not waiting.done()
    await inbox.put(NodeConnected(node_id="a"))
    await waiting
    taken(inbox)
    again = asyncio.create_task(inbox.wait_for_others())
    await asyncio.sleep(0)
    assert not inbox and not again.done()
    again.cancel()


async def test_node_messages_can_stay_in_the_inbox() -> None:
    inbox = Inbox()
    waiting = asyncio.create_task(inbox.wait_for_own())
    await inbox.put(NodeConnected(node_id="a"))
    await asyncio.sleep(0)
    assert not waiting.done() and inbox.take(of_nodes=False) == [], "only a node's message is waiting"
    await inbox.put(RolloutScored(rollout_id="1-0", reward=1.0))
    await waiting
    assert inbox.take(of_nodes=False) == [RolloutScored(rollout_id="1-0", reward=1.0)]
    assert inbox.take(of_nodes=False) == [] and inbox
    waiting = asyncio.create_task(inbox.wait_for_own())
    await asyncio.sleep(0)
    assert not waiting.done(), "the event was taken"
    waiting.cancel()
    assert taken(inbox) == [NodeConnected(node_id="a")]
