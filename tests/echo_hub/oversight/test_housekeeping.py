from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from echo_hub.config.training_sections import LearnerConfig
from echo_hub.core.accounting.effects import StandingRecorded, TrustDecided
from echo_hub.core.accounting.events import NodePardoned
from echo_hub.core.coordinator import Coordinator
from echo_hub.core.status import CoordinatorStatus
from echo_hub.core.trust.standing import Decision, StandingRow, StandingState
from echo_hub.oversight import housekeeping as housekeeping_module
from echo_hub.oversight.housekeeping import Housekeeping
from echo_hub.run.directory import RunDirectory
from echo_hub.store.invites import add_invite, revoke_invite
from echo_hub.store.known_nodes import ban_nodes, unban_nodes
from echo_hub.store.reports import read_leaderboard
from echo_hub.store.standings import read_wanted_pardons, want_pardon
from echo_shared.records.run import Invite

Drive = Callable[..., Awaitable[Any]]


class Barred:
    """Records each announced set of banned nodes."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[frozenset[str]] = asyncio.Queue()
        self.known: list[frozenset[str]] = []
        self.invites: list[Invite] = []
        self.num_renewed = 0

    def bar(self, node_ids: frozenset[str]) -> None:
        self.told.put_nowait(node_ids)

    def note_useful(self, node_ids: frozenset[str]) -> None:
        self.known.append(node_ids)

    def renew(self, invites: Sequence[Invite]) -> None:
        self.invites = list(invites)
        self.num_renewed += 1

    async def until(self, node_ids: frozenset[str]) -> None:
        async with asyncio.timeout(60):
            while await self.told.get() != node_ids:
                pass


class Published:
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def status(self) -> CoordinatorStatus:
        return replace(self._coordinator.status(), published_version=4)


async def house(drive: Drive, directory: RunDirectory, barred: Barred) -> tuple[Any, Housekeeping]:
    driven = await drive(running=False)
    keeping = Housekeeping(
        LearnerConfig(adapters_kept=1),
        store=driven.async_store,
        directory=directory,
        coordinator=Published(driven.driver.coordinator),
        queue=driven.queue,
        live={"a": None},
        evaluating={2},
        bans=barred,
        invitations=barred,
        nodes=barred,
    )
    for node_id in ("a", "b"):
        await driven.async_store.on_writer(
            driven.async_store.store.node_seen,
            node_id=node_id,
            public_key=bytes(32),
            name=node_id,
            backend="torch",
            device="cpu",
            now=1.0,
        )
    return driven, keeping


async def test_connected_nodes_are_noted_and_unneeded_adapters_deleted(drive: Drive, tmp_path: Any) -> None:
    directory = RunDirectory(tmp_path)
    for version in (1, 2, 3, 4):
        directory.adapter(version).mkdir(parents=True)
    barred = Barred()
    driven, keeping = await house(drive, directory, barred)
    await keeping.keep_house()
    assert barred.known == [frozenset()], "no node has done useful work"
    seen = {row.node_id: row.last_seen for row in driven.store.read(read_leaderboard)}
    assert seen["a"] > 1.0 and seen["b"] == 1.0
    assert set(directory.adapter_versions()) == {2, 4}, "one is being evaluated, one is the newest"


async def test_old_adapters_make_room_while_the_store_waits_for_a_full_disk(
    drive: Drive, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path)
    for version in (1, 2, 3, 4):
        directory.adapter(version).mkdir(parents=True)
    driven, keeping = await house(drive, directory, Barred())
    waits = asyncio.Event()

    async def wait_for_room(*_: object, **__: object) -> None:
        waits.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(driven.async_store, "on_writer", wait_for_room)
    task = asyncio.create_task(keeping.keep_house())
    await waits.wait()
    assert set(directory.adapter_versions()) == {2, 4}
    task.cancel()


async def test_bans_and_their_end_and_invites_are_reported(
    drive: Drive, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(housekeeping_module, "BANS_S", 0.001)
    barred = Barred()
    driven, keeping = await house(drive, RunDirectory(tmp_path), barred)
    watching = asyncio.create_task(keeping.watch_bans())
    await barred.until(frozenset())
    driven.store.write(add_invite, Invite(name="Ada", token_hash="h", max_keys=1, created_at=1.0, expires_at=2.0))
    driven.store.write(ban_nodes, ["b"], 2.0)
    await barred.until(frozenset({"b"}))
    await barred.until(frozenset({"b"}))
    assert [(invite.name, invite.revoked_at) for invite in barred.invites] == [("Ada", None)]
    driven.store.write(revoke_invite, "Ada", 3.0)
    driven.store.write(unban_nodes, ["b"])
    await barred.until(frozenset())
    await barred.until(frozenset())
    assert [(invite.name, invite.revoked_at) for invite in barred.invites] == [("Ada", 3.0)]
    assert barred.num_renewed == 3, "once at first, and after each change"
    told = [(record.event, record.subject) for record in caplog.records if hasattr(record, "event")]  # type: ignore[attr-defined]
    assert told == [("node_banned", "b"), ("node_unbanned", "b")]
    watching.cancel()
    await asyncio.wait([watching])


async def test_a_pardon_is_reported_until_it_is_recorded(
    drive: Drive, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping_module, "BANS_S", 0.001)
    driven, keeping = await house(drive, RunDirectory(tmp_path), Barred())
    driven.store.apply([StandingRecorded(row=StandingRow(node_id="b", state=StandingState.QUARANTINED))], 1.0)
    watching = asyncio.create_task(keeping.watch_pardons())
    driven.store.write(want_pardon, ["b"], 2.0)
    async with asyncio.timeout(60):
        await driven.queue.wait()
    assert driven.queue.take() == [NodePardoned(node_id="b")]
    decided = TrustDecided(node_id="b", decision=Decision.PARDONED, reason="", decided_at=3.0)
    driven.store.apply([decided], 3.0)
    assert driven.store.read(read_wanted_pardons) == frozenset()
    watching.cancel()
    await asyncio.wait([watching])
