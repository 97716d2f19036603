from __future__ import annotations

import asyncio

import pytest

from echo_hub.config.sections import HubConfig
from echo_hub.core.accounting.events import GroupPrepared
from echo_hub.driving.event_queue import EventQueue
from echo_hub.run.base_model import PromptCodec, resolve_base
from echo_hub.scoring import preparing
from echo_hub.scoring.preparing import GroupPreparation
from echo_hub.scoring.problems import Problems


async def next_of(queue: EventQueue) -> GroupPrepared:
    while not (events := queue.take()):
        await queue.wait()
    (event,) = events
    assert isinstance(event, GroupPrepared)
    return event


@pytest.mark.parametrize("together_s", [0.0, 60.0], ids=["one at a time", "all together"])
async def test_groups_are_answered_in_order_with_their_own_seeds(
    together_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "TOGETHER_S", together_s)
    config = HubConfig()
    problems = Problems.of_run(config, PromptCodec.of_run(config, resolve_base("builtin:tiny")))
    queue = EventQueue()
    preparation = GroupPreparation(problems, queue)
    for group_id in (0, 1, 2, 0):
        preparation.submit(group_id)
    working = asyncio.create_task(preparation.run())
    async with asyncio.timeout(60):
        events = [await next_of(queue) for _ in range(4)]
    preparation.submit(3)
    async with asyncio.timeout(60):
        assert (await next_of(queue)).group_id == 3, "what comes later, too"
    working.cancel()
    await asyncio.wait([working])
    assert [(event.group_id, event.seed) for event in events] == [(n, problems.seed(n)) for n in (0, 1, 2, 0)]
    assert [event.prompt_tokens for event in events] == [len(problems.prompt_ids(n)) for n in (0, 1, 2, 0)]
    assert len({event.seed for event in events}) == len({event.prompt for event in events}) == 3
    assert events[0].prompt == events[3].prompt, "a repeated prompt is recognized"
