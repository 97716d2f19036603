from __future__ import annotations

import asyncio
from typing import Any

from echo_hub.dashboard.model import Changes


async def test_a_change_wakes_everyone_who_waits() -> None:
    changes = Changes()
    waiting = [asyncio.create_task(changes.wait(0)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    changes.notify()
    assert await asyncio.gather(*waiting) == [1, 1, 1]


async def test_a_missed_change_is_seen_at_the_next_wait() -> None:
    changes = Changes()
    for _ in range(5):
        changes.notify()
    assert await changes.wait(2) == 5
    assert await changes.wait(-1) == 5


async def test_a_cancelled_wait_leaves_the_others_alone() -> None:
    changes = Changes()
    left, stays = asyncio.create_task(changes.wait(0)), asyncio.create_task(changes.wait(0))
    await asyncio.sleep(0)
    left.cancel()
    changes.notify()
    assert await stays == 1
    assert left.cancelled() or left.cancelling()


async def test_accuracy_before_is_the_base_models_and_after_the_newest(make_source: Any) -> None:
    fresh, late = await make_source(step=0).run_view(), await make_source(step=37).run_view()
    assert (fresh.accuracy_before, fresh.accuracy_after) == (None, None)
    assert late.accuracy_before == late.evaluations[0].greedy.accuracy
    assert late.accuracy_after == late.evaluations[-1].greedy.accuracy
    assert late.evaluations[-1].greedy.policy_version == 30
