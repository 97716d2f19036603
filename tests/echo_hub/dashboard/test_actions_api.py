from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest
from aiohttp import ClientSession

from echo_hub.dashboard.actions_api import MAX_BODY_BYTES
from echo_hub.driving.progress import RunProgress
from echo_hub.evaluation.measuring import EvaluationRecords
from tests.echo_hub.views.conftest import evaluated


@pytest.fixture
async def admin(open_hub: Any, source: Any, desk: Any) -> ClientSession:
    session: ClientSession = await open_hub(source, desk=desk)
    return session


async def acted(session: ClientSession, action: str, token: str = "", **fields: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with session.post(f"/api/v1/actions/{action}", json=fields, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_a_setting_is_changed_told_and_taken_back(admin: ClientSession, source: Any) -> None:
    changes = source.changes.number
    status, told = await acted(admin, "max_staleness", value=4)
    record = told["record"]
    assert (status, record["outcome"], record["before"], record["after"]) == (200, "done", 1, 4)
    assert (record["who"], record["via"], told["secret"]) == ("the operator's token", "api", "")
    assert source.changes.number > changes, "viewers are notified"
    async with admin.post(f"/api/v1/actions/{record['number']}/undo") as answer:
        undone = (await answer.json())["record"]
    assert (undone["before"], undone["after"], undone["undoes"]) == (4, 1, record["number"])
    async with admin.post(f"/api/v1/actions/{record['number']}/undo") as answer:
        assert answer.status == 404, "only once"
    async with admin.get("/api/v1/actions") as answer:
        listed = (await answer.json())["actions"]
    assert [one["number"] for one in listed] == [undone["number"], record["number"]]
    async with admin.get(f"/api/v1/actions?before={undone['number']}") as answer:
        assert len((await answer.json())["actions"]) == 1


async def test_a_refused_action_gives_the_reason_and_is_logged(admin: ClientSession) -> None:
    status, told = await acted(admin, "publish_every", value=9)
    assert status == 409 and "Raise the bound first" in told["record"]["detail"]
    status, told = await acted(admin, "ban", node="nobody")
    assert status == 409 and "ever joined" in told["record"]["detail"]
    status, told = await acted(admin, "evaluate", version=7)
    assert status == 409 and told["record"]["detail"] == "Version 7 has no adapter, or no longer has one."
    async with admin.get("/api/v1/actions") as answer:
        assert [one["outcome"] for one in (await answer.json())["actions"]] == ["refused"] * 3


async def test_a_slow_actions_outcome_is_reported_on_the_next_request(admin: ClientSession, desk: Any) -> None:
    status, told = await acted(admin, "evaluate")
    assert (status, told["record"]["outcome"]) == (202, "wanted")
    progress = RunProgress(last_version=9, evaluated=())
    records = EvaluationRecords(desk._store, progress=progress, due=desk._due, changes=desk._changes)
    await records.record(evaluated(0, 0.5))
    async with admin.get("/api/v1/actions") as answer:
        assert [one["outcome"] for one in (await answer.json())["actions"]] == ["done"]


async def test_a_token_is_valid_for_its_scope_until_it_is_revoked(admin: ClientSession, source: Any) -> None:
    secrets = {}
    for scope in ("read", "operate", "admin"):
        status, told = await acted(admin, "token", name=f"for {scope}", scope=scope)
        secrets[scope] = told["secret"]
        assert status == 200 and told["secret"] not in json.dumps(told["record"])
    node = (await source.nodes())[0].totals.node_id
    expected = {"read": (403, 403, 403), "operate": (200, 403, 403), "admin": (409, 200, 200)}
    for scope, (bans, invites, lists) in expected.items():
        assert (await acted(admin, "ban", secrets[scope], node=node))[0] == bans
        assert (await acted(admin, "invite", secrets[scope], name=f"by {scope}"))[0] == invites
        headers = {"Authorization": f"Bearer {secrets[scope]}"}
        async with admin.get("/api/v1/tokens", headers=headers) as answer:
            text = await answer.text()
            assert answer.status == lists and "hash" not in text
        for path in ("/api/v1/run", "/metrics", "/"):
            async with admin.get(path, headers=headers) as answer:
                assert answer.status == 200, (scope, path)
    async with admin.get("/api/v1/actions") as answer:
        whose = {one["who"] for one in (await answer.json())["actions"]}
    assert whose == {"the operator's token", "for operate", "for admin"}, (
        "actions outside a token's scope are not logged"
    )
    assert (await acted(admin, "revoke_token", name="for admin"))[0] == 200
    assert (await acted(admin, "pause", secrets["admin"]))[0] == 401, "at once"


async def test_the_operate_scope_cannot_undo_an_admins_action(admin: ClientSession) -> None:
    _, made = await acted(admin, "token", name="ops", scope="operate")
    _, invited = await acted(admin, "invite", name="Ada")
    headers = {"Authorization": f"Bearer {made['secret']}"}
    async with admin.post(f"/api/v1/actions/{invited['record']['number']}/undo", headers=headers) as answer:
        assert answer.status == 403


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"{", "application/json"),
        (b"[" * 16_000, "application/json"),
        (b"[]", "application/json"),
        (b'"4"', "application/json"),
        (b'{"value": "4"}', "application/json"),
        (b'{"value": true}', "application/json"),
        (b'{"value": 1e999}', "application/json"),
        (b'{"value": NaN}', "application/json"),
        (b'{"value": 4, "more": 1}', "application/json"),
        (b'{"value": 4, "action": "pause"}', "application/json"),
        (b'{"value": ' + b"9" * 5_000 + b"}", "application/json"),
        (b"\xff\xfe", "application/json"),
        (b" " * (MAX_BODY_BYTES + 1), "application/json"),
        (b'{"value": 4}', "text/plain"),
        (b"value=4", "application/x-www-form-urlencoded"),
    ],
)
async def test_hostile_bodies_are_refused_and_change_nothing(
    admin: ClientSession, body: bytes, content_type: str
) -> None:
    headers = {"Content-Type": content_type}
    async with admin.post("/api/v1/actions/max_staleness", data=body, headers=headers) as answer:
        assert answer.status == 400 and set(await answer.json()) == {"error"}
    async with admin.get("/api/v1/actions") as answer:
        assert await answer.json() == {"actions": []}


@pytest.mark.parametrize("path", ["explode", "0/undo", "99999/undo", "x/undo", "-1/undo"])
async def test_unknown_paths_are_not_found(admin: ClientSession, path: str) -> None:
    async with admin.post(f"/api/v1/actions/{path}", json={}) as answer:
        assert answer.status == 404
    async with admin.get("/api/v1/actions?before=x") as answer:
        assert answer.status == 400


async def test_a_stranger_and_a_page_of_another_site_do_nothing(open_hub: Any, source: Any, desk: Any) -> None:
    stranger = await open_hub(source, token="", desk=desk)
    for headers in ({}, {"Authorization": "Bearer echo_" + "x" * 43}, {"Sec-Fetch-Site": "same-origin"}):
        async with stranger.post("/api/v1/actions/pause", json={}, headers=headers) as answer:
            assert answer.status == 401
    assert await desk.log(limit=10, before=None) == []


async def test_many_at_once_are_each_done_once(admin: ClientSession, desk: Any) -> None:
    running = asyncio.create_task(desk.run())
    try:
        told = await asyncio.gather(*(acted(admin, "learning_rate", value=1e-4 * (n + 1)) for n in range(20)))
    finally:
        running.cancel()
    assert [status for status, _ in told] == [200] * 20
    steps = sorted((one["record"]["number"], one["record"]["before"], one["record"]["after"]) for _, one in told)
    assert all(later[1] == earlier[2] for earlier, later in pairwise(steps)), "one after the other"
