from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo_hub.core.accounting.effects import RolloutsDropped, RolloutsLeased
from echo_hub.core.answer_groups import FIRST_ANSWER_ID
from echo_hub.lifecycle import retention as module
from echo_hub.lifecycle.retention import DAY_S, Retention
from echo_hub.store import retiring
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.browsing import NEWEST, find_rollouts
from echo_hub.store.reading import read_receipts
from echo_hub.store.reports import read_accounting, read_leaderboard
from echo_hub.store.store import Store
from echo_shared.records.rollout import RolloutFilter
from echo_shared.wire.messages import DropReason
from tests.echo_hub.written_steps import train


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    is_file = request.param == "sqlite"
    opened = Store.open(
        f"sqlite:///{tmp_path / 'echo.db'}" if is_file else request.getfixturevalue("postgresql_without_rows")
    )
    yield opened
    opened.close()


def steps_there(store: Store) -> list[int]:
    found = store.read(find_rollouts, RolloutFilter(), NEWEST, 1_000).rollouts
    return sorted({one.step for one in found if one.step is not None})


def retention(store: Store, steps: int, trained: int, answered_days: float = 0.0) -> Retention:
    coordinator: Any = SimpleNamespace(status=lambda: SimpleNamespace(trained_steps=trained))
    return Retention(steps, store=AsyncStore(store), coordinator=coordinator, answered_days=answered_days)


async def test_the_newest_steps_stay(store: Store) -> None:
    for step in range(1, 9):
        train(store, step)
    store.prune(6)
    before = (
        store.read(read_leaderboard),
        store.read(read_accounting),
        store.read(read_receipts, "a", ["1-0", "1-2", "8-1"]),
    )
    await retention(store, 3, 8).let_go()
    assert steps_there(store) == [6, 7, 8]
    await retention(store, 1, 8).let_go()
    assert steps_there(store) == [7, 8], "an unpruned step may have to be trained again"
    assert (
        store.read(read_leaderboard),
        store.read(read_accounting),
        store.read(read_receipts, "a", ["1-0", "1-2", "8-1"]),
    ) == before


async def test_tenants_samples_leave_by_age_alone(store: Store) -> None:
    now = time.time()
    lease = {"node_id": "a", "turn": 0, "policy_version": 0, "deadline": now}
    for number, days in enumerate((3, 2, 1)):
        groups = FIRST_ANSWER_ID + number
        leased = RolloutsLeased(lease_id=100 + number, group_id=groups, indices=(0,), **lease)
        dropped = RolloutsDropped(rollout_ids=(f"{100 + number}-0",), reason=DropReason.REVOKED)
        store.apply([leased, dropped], now=now - days * DAY_S + 60)
    train(store, 1)
    await retention(store, 0, 1, answered_days=2).let_go_of_answers()
    found = store.read(find_rollouts, RolloutFilter(), NEWEST, 1_000).rollouts
    assert {one.rollout_id for one in found} > {"101-0", "102-0"} and "100-0" not in {one.rollout_id for one in found}
    assert [one.rollout_id for one in store.read(read_receipts, "a", ["100-0", "102-0"])] == ["100-0", "102-0"]
    assert steps_there(store) == [1]


async def test_a_hub_that_was_stopped_in_the_middle_continues(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 1)
    for step in (1, 2, 3):
        train(store, step)
    store.prune(3)
    retire, asked = retiring.retire, 0

    def once(*given: Any) -> int:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise KeyboardInterrupt
        return retire(*given)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module, "retire", once)
        await retention(store, 1, 3).let_go()
    assert len(store.read(find_rollouts, RolloutFilter(step=1), NEWEST, 9).rollouts) == 2
    all_gone = asyncio.Event()
    monkeypatch.setattr(module, "LOOKED_S", 3600.0)
    again, let_go = retention(store, 1, 3), Retention.let_go

    async def noted(one: Retention) -> None:
        await let_go(one)
        all_gone.set()

    monkeypatch.setattr(Retention, "let_go", noted)
    work = asyncio.create_task(again.run())
    await asyncio.wait_for(all_gone.wait(), 60)
    work.cancel()
    assert steps_there(store) == [3]


async def test_without_a_setting_nothing_is_removed(store: Store) -> None:
    train(store, 1)
    store.prune(1)
    await retention(store, 0, 1).run()
    assert steps_there(store) == [1]


def test_old_rows_are_removed_while_new_ones_are_written(store: Store) -> None:
    """Two connections write at the same time, as two processes do; no row may be lost."""
    for step in range(1, 41):
        train(store, step)
    store.prune(40)
    beside = Store.open(store.engine.url.render_as_string(hide_password=False), beside_hub=True)
    hub = threading.Thread(target=lambda: [train(store, step) for step in range(41, 61)])
    hub.start()
    asyncio.run(retention(beside, 1, 40).let_go())
    hub.join()
    beside.close()
    assert steps_there(store) == list(range(40, 61))
    accounting = store.read(read_accounting)
    assert accounting.balanced and accounting.trained == 120
    states = [one.state for one in store.read(read_receipts, "a", [f"{step}-0" for step in range(1, 61)])]
    assert states == ["trained"] * 60
