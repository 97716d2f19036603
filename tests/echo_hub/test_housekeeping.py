from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from echo_hub import housekeeping as housekeeping_module
from echo_hub.config.sections import LearnerConfig
from echo_hub.housekeeping import Housekeeping
from echo_hub.run.directory import RunDirectory

Drive = Callable[..., Awaitable[Any]]


class Barred:
    """Every set of banned nodes that was told, in order."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[frozenset[str]] = asyncio.Queue()

    def bar(self, node_ids: frozenset[str]) -> None:
        self.told.put_nowait(node_ids)

    async def until(self, node_ids: frozenset[str]) -> None:
        async with asyncio.timeout(60):
            while await self.told.get() != node_ids:
                pass


async def house(drive: Drive, directory: RunDirectory, barred: Barred) -> tuple[Any, Housekeeping]:
    driven = await drive(running=False)
    keeping = Housekeeping(
        LearnerConfig(adapters_kept=1),
        store=driven.async_store,
        directory=directory,
        status=lambda: replace(driven.driver.coordinator.status(), published_version=4),
        nodes={"a": None},
        evaluating={2},
        bar=barred.bar,
    )
    for node_id in ("a", "b"):
        await driven.async_store.node_seen(
            node_id=node_id, public_key=bytes(32), name=node_id, backend="torch", device="cpu", now=1.0
        )
    return driven, keeping


async def test_who_is_here_is_noted_and_adapters_that_nobody_needs_go(drive: Drive, tmp_path: Any) -> None:
    directory = RunDirectory(tmp_path)
    for version in (1, 2, 3, 4):
        directory.adapter(version).mkdir(parents=True)
    driven, keeping = await house(drive, directory, Barred())
    await keeping.keep_house()
    seen = {row.node_id: row.last_seen for row in driven.store.leaderboard()}
    assert seen["a"] > 1.0 and seen["b"] == 1.0
    assert set(directory.adapter_versions()) == {2, 4}, "one is evaluated, one is the newest"


async def test_bans_and_their_end_are_told(drive: Drive, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping_module, "BANS_S", 0.001)
    barred = Barred()
    driven, keeping = await house(drive, RunDirectory(tmp_path), barred)
    watching = asyncio.create_task(keeping.watch_bans())
    await barred.until(frozenset())
    driven.store.ban(["b"], 2.0)
    await barred.until(frozenset({"b"}))
    driven.store.unban(["b"])
    await barred.until(frozenset())
    watching.cancel()
    await asyncio.wait([watching])
