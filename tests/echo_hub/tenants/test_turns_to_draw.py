from __future__ import annotations

import asyncio

from echo_hub.tenants.turns_to_draw import TurnsToDraw


async def drawn(
    turns: TurnsToDraw,
    tenant_id: str,
    name: str,
    log: list[str],
    go: asyncio.Event,
    twins: int | None = None,
    count: int = 1,
) -> None:
    async with turns.turn(tenant_id, name, cost=1_000.0, num_samples=count, twins=twins):
        log.append(name)
        await go.wait()


async def test_tenants_get_equal_shares_of_the_turns() -> None:
    turns, log, go = TurnsToDraw(1), [], asyncio.Event()
    tasks = [
        asyncio.create_task(drawn(turns, tenant_id, f"{tenant_id}{number}", log, go))
        for tenant_id, count in (("a", 20), ("b", 5))
        for number in range(count)
    ]
    await asyncio.sleep(0.01)
    assert log == ["a0"]
    go.set()
    await asyncio.gather(*tasks)
    assert sum(name.startswith("b") for name in log[:11]) >= 4
    assert len(log) == 25


async def test_cancelled_requests_leave_their_turns_to_others() -> None:
    turns, log, go = TurnsToDraw(2), [], asyncio.Event()
    tasks = {name: asyncio.create_task(drawn(turns, "a", name, log, go)) for name in "vwxyz"}
    await asyncio.sleep(0.01)
    assert log == ["v", "w"]
    for name in "vx":  # One holds a turn, one waits for it.
        tasks[name].cancel()
    await asyncio.sleep(0.01)
    assert log == ["v", "w", "y"]
    go.set()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert log == ["v", "w", "y", "z"]


async def test_a_request_cancelled_as_its_turn_comes_does_not_lose_it() -> None:
    turns, log, go = TurnsToDraw(1), [], asyncio.Event()
    tasks = {name: asyncio.create_task(drawn(turns, "a", name, log, go)) for name in "xyz"}
    await asyncio.sleep(0.01)
    tasks["x"].cancel()
    tasks["y"].cancel()
    await asyncio.sleep(0.01)
    assert log == ["x", "z"]
    go.set()
    await asyncio.gather(*tasks.values(), return_exceptions=True)


async def test_equal_requests_get_their_turns_together_and_their_tenant_pays() -> None:
    turns, log, go = TurnsToDraw(1), [], asyncio.Event()
    names = [("a", f"a{number}", 1) for number in range(6)] + [("b", "b0", None), ("b", "b1", None), ("a", "a6", None)]
    first = asyncio.create_task(drawn(turns, "c", "c0", log, go))
    await asyncio.sleep(0.01)
    rest = asyncio.Event()
    tasks = [asyncio.create_task(drawn(turns, tenant, name, log, rest, twins)) for tenant, name, twins in names]
    await asyncio.sleep(0.01)
    assert log == ["c0"]
    go.set()
    await first
    await asyncio.sleep(0.01)
    assert log[1:] == [f"a{number}" for number in range(6)], "one prefill serves them all"
    rest.set()
    await asyncio.gather(*tasks)
    assert log[7:] == ["b0", "b1", "a6"]


async def test_samples_are_counted_and_the_limit_may_grow() -> None:
    turns, log, go = TurnsToDraw(4), [], asyncio.Event()
    tasks = [asyncio.create_task(drawn(turns, "a", f"a{number}", log, go, count=3)) for number in range(5)]
    await asyncio.sleep(0.01)
    assert log == ["a0", "a1"], "6 samples are drawn"
    turns.change(7)
    await asyncio.sleep(0.01)
    assert log == ["a0", "a1", "a2"]
    tasks[0].cancel()
    tasks[4].cancel()
    await asyncio.sleep(0.01)
    assert log == ["a0", "a1", "a2", "a3"]
    go.set()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_requests_that_nobody_draws_leave_turns_to_others() -> None:
    turns, log, never, go = TurnsToDraw(8), [], asyncio.Event(), asyncio.Event()
    stuck = [asyncio.create_task(drawn(turns, "a", f"a{number}", log, never)) for number in range(20)]
    await asyncio.sleep(0.01)
    assert len(log) == 8
    others = [asyncio.create_task(drawn(turns, "b", f"b{number}", log, go)) for number in range(10)]
    await asyncio.sleep(0.01)
    assert log[8:] == ["b0", "b1"], "half of the turns, shared among two tenants, are in reserve"
    go.set()
    await asyncio.wait_for(asyncio.gather(*others), 5)
    assert len(log) == 18
    for task in stuck:
        task.cancel()
    await asyncio.gather(*stuck, return_exceptions=True)
