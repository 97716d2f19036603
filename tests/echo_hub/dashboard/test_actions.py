from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientSession

from echo_hub.core.trust.standing import StandingState
from echo_hub.dashboard.actions import BUTTONS, buttons


class Books:
    """The hub's side: which node was banned, and let in again."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []

    async def ban(self, node_id: str) -> None:
        self.done.append(("ban", node_id))

    async def unban(self, node_id: str) -> None:
        self.done.append(("unban", node_id))


@pytest.fixture
def books() -> Books:
    return Books()


@pytest.fixture
async def acting(open_hub: Any, source: Any, books: Books) -> ClientSession:
    hub: ClientSession = await open_hub(source, actions={"ban": books.ban, "unban": books.unban})
    return hub


async def test_a_script_bans_with_the_token_alone(acting: ClientSession, source: Any, books: Books) -> None:
    node_id = (await source.nodes())[0].totals.node_id
    changes = source.changes.number
    async with acting.post("/actions/ban", data={"node": node_id}) as answer:
        assert (answer.status, await answer.json()) == (200, {})
    assert books.done == [("ban", node_id)]
    assert source.changes.number == changes + 1, "and whoever looks on sees it"


async def test_what_is_no_action_or_no_node_changes_nothing(acting: ClientSession, source: Any, books: Books) -> None:
    node_id = (await source.nodes())[0].totals.node_id
    for path, form in (
        ("/actions/delete", {"node": node_id}),
        ("/actions/ban", {"node": "nobody"}),
        ("/actions/ban", {}),
        ("/actions/ban", {"node": node_id[:10]}),
    ):
        async with acting.post(path, data=form) as answer:
            assert answer.status == 404
    async with acting.get("/actions/ban") as answer:
        assert answer.status == 405, "nothing is changed by following a link"
    assert books.done == []


async def test_a_stranger_bans_nobody(open_hub: Any, source: Any, books: Books) -> None:
    stranger = await open_hub(source, token="", actions={"ban": books.ban})
    node_id = (await source.nodes())[0].totals.node_id
    async with stranger.post(
        "/actions/ban", data={"node": node_id}, headers={"Sec-Fetch-Site": "same-origin"}
    ) as answer:
        assert answer.status == 401
    assert books.done == []


async def test_every_node_has_the_buttons_that_are_for_it(source: Any) -> None:
    for node in await source.nodes():
        actions = [button.action for button in buttons(node) if button.action != "pardon"]
        assert actions == ["unban" if node.banned else "ban"]
    assert len({button.action for button in BUTTONS}) == len(BUTTONS)


async def test_who_is_quarantined_may_be_pardoned(source: Any) -> None:
    node = (await source.nodes())[0]
    stands = [replace(node, totals=replace(node.totals, standing=state)) for state in ("", *StandingState)]
    offered = [one.totals.standing for one in stands if "pardon" in [button.action for button in buttons(one)]]
    assert offered == [StandingState.QUARANTINED]
