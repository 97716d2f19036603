"""The desk, which carries out operators' actions, over a real coordinator, driver and store. The outcome of an action
must survive the hub.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from echo_hub.actions.records import ActionOutcome, Actor
from echo_hub.actions.requests import TABLE, Pause, request_of
from echo_hub.config.sections import HubConfig
from echo_hub.core.accounting.effects import TellOperator
from echo_hub.dashboard.access.credentials import OperatorCredentials
from echo_hub.dashboard.access.guard import Guard, Visits
from echo_hub.dashboard.actions import ForbiddenError, NoSuchActionError
from echo_hub.dashboard.source import Changes
from echo_hub.evaluation.due import DueVersions
from echo_hub.oversight.operator_desk import Desk, asked_of
from echo_hub.run.directory import RunDirectory
from echo_hub.store.actions import find_action, note_action, read_settings, read_wanted_actions

CLI = Actor(via="cli", who="ada")


class Hub:
    """Stand-in for the parts of a hub that the desk calls to carry out operators' actions."""

    def __init__(self, driven: Any, directory: RunDirectory) -> None:
        credentials = OperatorCredentials(token=directory.operator_token, password=directory.operator_password)
        credentials.open()
        visits = Visits(place=lambda _: "here", is_https=lambda _: False)
        self.guard = Guard(credentials, visits, name="test")
        self.books = driven.store
        self.rotated = 0
        self.changes = Changes()
        self.due = DueVersions(HubConfig(), directory, done=())
        self.desk = Desk(
            driven.async_store,
            directory,
            guard=self.guard,
            queue=driven.queue,
            due=self.due,
            run_keys=self,
            changes=self.changes,
        )
        driven.look = lambda action: self.desk.settled(action.number) if isinstance(action, TellOperator) else None

    def rotate_key(self) -> None:
        self.rotated += 1

    async def has_nothing_to_do(self) -> None:
        async with asyncio.timeout(60):
            while self.books.read(read_wanted_actions):
                await self.changes.wait(self.changes.number)


@pytest.fixture
async def hub(drive: Any, tmp_path: Path) -> Hub:
    return Hub(await drive(), RunDirectory(tmp_path))


async def test_a_commands_action_is_done_once_within_a_second(hub: Hub) -> None:
    running = asyncio.create_task(hub.desk.run())
    number = hub.books.write(note_action, Pause(), CLI, time.time()).number
    await hub.has_nothing_to_do()
    running.cancel()
    record = hub.books.read(find_action, number)
    assert record is not None and (record.outcome, record.before, record.after) == (
        ActionOutcome.DONE,
        "open",
        "paused",
    )
    assert hub.books.read(read_settings) == {"leasing": "paused"}


async def test_an_action_stored_without_a_hub_is_done_by_the_next(drive: Any, tmp_path: Path) -> None:
    first = Hub(await drive(running=False), RunDirectory(tmp_path))
    first.books.write(note_action, Pause(), CLI, time.time())
    second = Hub(await drive(), RunDirectory(tmp_path))
    running = asyncio.create_task(second.desk.run())
    await second.has_nothing_to_do()
    running.cancel()
    assert second.books.read(read_settings) == {"leasing": "paused"}


async def test_an_evaluation_is_wanted_until_its_figures_are_there(hub: Hub, tmp_path: Path) -> None:
    RunDirectory(tmp_path).adapter(3).mkdir(parents=True)
    told = await hub.desk.act("evaluate", {}, CLI)
    assert told.record.outcome is ActionOutcome.WANTED
    assert await hub.due.next() == 3
    assert hub.due.take_actions(3) == {told.record.number}
    found = hub.books.read(find_action, told.record.number)
    assert found is not None and found.outcome is ActionOutcome.WANTED
    refused = await hub.desk.act("evaluate", {"version": 9}, CLI)
    assert (refused.record.outcome, refused.record.detail) == (
        ActionOutcome.REFUSED,
        "Version 9 has no adapter, or no longer has one.",
    )


async def test_a_version_is_exported_into_the_run(hub: Hub, tmp_path: Path) -> None:
    refused = (await hub.desk.act("export", {}, CLI)).record
    assert refused.outcome is ActionOutcome.REFUSED and refused.detail
    adapter = RunDirectory(tmp_path).adapter(4)
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    told = (await hub.desk.act("export", {}, CLI)).record
    assert (told.outcome, told.after) == (ActionOutcome.DONE, 4) and str(
        tmp_path / "exports" / "v000004"
    ) in told.detail
    assert (tmp_path / "exports" / "v000004" / "adapter_config.json").read_text() == "{}"
    again = (await hub.desk.act("export", {"version": 4}, CLI)).record
    assert again.outcome is ActionOutcome.REFUSED and "exists already" in again.detail


async def test_keys_are_rotated(hub: Hub, tmp_path: Path) -> None:
    before = hub.guard.credentials.token
    assert (await hub.desk.act("rotate_run_key", {}, CLI)).record.outcome is ActionOutcome.DONE
    assert hub.rotated == 1
    told = (await hub.desk.act("rotate_operator_token", {}, CLI)).record
    assert told.outcome is ActionOutcome.DONE and not hub.guard.credentials.is_token(before)
    assert hub.guard.credentials.token == RunDirectory(tmp_path).operator_token.read_text().strip()
    assert hub.guard.credentials.token not in told.detail


async def test_a_scope_is_asked_for_before_anything_is_noted(hub: Hub) -> None:
    reader, operator = (Actor(via="api", who="ci", scope=scope) for scope in ("read", "operate"))
    for actor, action, fields in (
        (reader, "pause", {}),
        (operator, "token", {"name": "more", "scope": "admin"}),
        (operator, "rotate_run_key", {}),
    ):
        with pytest.raises(ForbiddenError):
            await hub.desk.act(action, fields, actor)
    assert await hub.desk.log(limit=9, before=None) == []


async def test_an_action_without_undo_is_reported(hub: Hub) -> None:
    told = await hub.desk.act("rotate_run_key", {}, CLI)
    for number in (told.record.number, 99):
        with pytest.raises(NoSuchActionError):
            await hub.desk.undo(number, CLI)


@pytest.mark.parametrize("action", TABLE)
def test_every_action_is_done_by_exactly_one_part(action: str) -> None:
    """Every action has exactly one part that does it: the coordinator, the store, or the hub itself (`_do` and
    `_begin`). Two parts would do it twice.
    """
    given = {
        **{name: {"value": 1} for name in ("max_staleness", "publish_every", "learning_rate", "spend_cap_per_hour")},
        "objective": {"value": "clip_high=0.3"},
        **{name: {"node": "a"} for name in ("ban", "unban", "pardon", "trust", "distrust")},
        **{name: {"name": "a"} for name in ("invite", "uninvite", "token", "revoke_token")},
        **{name: {"tenant": "a"} for name in ("tenant_quota", "block_tenant", "unblock_tenant")},
    }
    request = request_of(action, given.get(action, {}))
    by_hub = {"evaluate", "export", "rotate_run_key", "rotate_operator_token"}
    assert (asked_of(1, request) is not None) + request.IN_BOOKS + (action in by_hub) == 1
