from __future__ import annotations

import asyncio

import pytest

from echo_hub.tenants.computing import ComputerHost
from echo_shared.errors import LearnerError
from tests.echo_hub.tenants.small_models import SmallModels, SmallStarter


class SlowStarter(SmallStarter):
    """A starter of model processes whose first starts fail."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    async def start(self) -> SmallModels:
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise LearnerError("The base model cannot be loaded.", do="Check it.")
        return await super().start()


async def test_the_process_is_started_once_for_all_callers() -> None:
    host = ComputerHost(SmallStarter())
    found = await asyncio.gather(*(host.get() for _ in range(5)))
    assert len(set(map(id, found))) == 1
    await host.lost(found[0])
    second = await host.get()
    assert second is not found[0]
    await host.lost(found[0])  # A late report about the first process must not end the second.
    assert await host.get() is second


async def test_failed_starts_are_repeated_and_named(caplog: pytest.LogCaptureFixture) -> None:
    host = ComputerHost(starter := SlowStarter(failures=2), first_wait_s=0.05)
    waiting = asyncio.create_task(host.get())
    await asyncio.sleep(0.02)
    assert "cannot be loaded" in host.trouble
    assert await waiting is starter.current
    assert host.trouble == ""
    await host.stop()
    assert starter.current.is_dead


class LoadingStarter(SmallStarter):
    """A starter of model processes that load their base model until `is_loaded` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_loaded = asyncio.Event()
        self.num_begun = self.num_ended_early = 0

    async def start(self) -> SmallModels:
        self.num_begun += 1
        try:
            await self.is_loaded.wait()
        except asyncio.CancelledError:
            self.num_ended_early += 1
            raise
        return await super().start()


async def test_a_caller_that_leaves_does_not_end_the_start() -> None:
    host = ComputerHost(starter := LoadingStarter())
    for _ in range(3):  # Clients give up sooner than a large model is loaded, and ask again.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(host.get(), 0.01)
    starter.is_loaded.set()
    assert await host.get() is starter.current
    assert (starter.num_begun, starter.num_ended_early) == (1, 0)


async def test_a_stop_ends_a_start_that_no_caller_waits_for() -> None:
    host = ComputerHost(starter := LoadingStarter())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(host.get(), 0.01)
    async with asyncio.timeout(5):
        await host.stop()
    assert (starter.num_begun, starter.num_ended_early) == (1, 1)
    assert host.running() is None
