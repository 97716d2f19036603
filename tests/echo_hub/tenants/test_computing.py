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
