import asyncio

import pytest

from echo_node.net.online import Online

PATIENCE_S = 60.0


async def test_a_job_is_stopped_when_the_network_goes_and_begun_again() -> None:
    online, begun, ends, cancelled = Online(), asyncio.Queue[int](), asyncio.Event(), []

    async def job() -> str:
        begun.put_nowait(0)
        try:
            await ends.wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return "done"

    task = asyncio.create_task(online.run(job))
    async with asyncio.timeout(PATIENCE_S):
        await begun.get()
        online.turn(on=False)
        online.turn(on=False)
        while not cancelled:  # noqa: ASYNC110
            await asyncio.sleep(0)
        ends.set()
        assert not online.is_on and begun.empty() and not task.done()
        online.turn(on=True)
        assert await task == "done" and begun.qsize() == 1


async def test_a_jobs_error_is_raised_and_cancellation_reaches_it() -> None:
    online, begun = Online(), asyncio.Event()

    async def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await online.run(fails)

    async def waits() -> None:
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(online.run(waits))
    await begun.wait()
    task.cancel()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wait({task})
    assert task.cancelled() and [one for one in asyncio.all_tasks() if one is not asyncio.current_task()] == []
