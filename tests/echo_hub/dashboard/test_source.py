from __future__ import annotations

import asyncio

from echo_hub.dashboard.source import Changes


async def test_a_change_wakes_all_waiting_viewers() -> None:
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
