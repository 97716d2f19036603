"""The page of operators' actions works without JavaScript: forms start actions, actions are confirmed and logged, and
secrets are shown only once."""

from __future__ import annotations

import re
from http.cookies import SimpleCookie
from typing import Any, get_args

import pytest
from aiohttp import ClientSession

from echo_hub.actions.records import TokenScope
from echo_hub.actions.requests import TABLE
from echo_hub.dashboard.actions_page import OF_NODES, form_fields

HTML = {"Accept": "text/html", "Sec-Fetch-Site": "same-origin"}


class Browser:
    """A client with a session cookie that submits the forms of a page as a browser does."""

    def __init__(self, session: ClientSession, cookie: str, key: str) -> None:
        self._session = session
        self._key = key
        self._headers = {**HTML, "Cookie": cookie}

    async def get(self, path: str = "/actions") -> str:
        async with self._session.get(path, headers=self._headers) as answer:
            assert answer.status == 200
            return await answer.text()

    async def post(self, path: str, **fields: str) -> tuple[int, str]:
        data = {"page_key": self._key, **fields}
        async with self._session.post(path, data=data, headers=self._headers, allow_redirects=False) as answer:
            return answer.status, answer.headers.get("Location") or await answer.text()


@pytest.fixture
async def browser(open_hub: Any, source: Any, desk: Any, guard: Any) -> Browser:
    session = await open_hub(source, token="", desk=desk)
    async with session.get(f"/?token={guard.credentials.token}", allow_redirects=False) as answer:
        (morsel,) = SimpleCookie(answer.headers["Set-Cookie"]).values()
        key = answer.headers["Location"].partition("#key=")[2]
    session.cookie_jar.clear()
    return Browser(session, f"{morsel.key}={morsel.value}", key)


async def test_there_is_a_form_for_every_action_but_those_of_nodes(browser: Browser) -> None:
    page = await browser.get()
    forms = set(re.findall(r'id="do-(\w+)"', page))
    assert forms == TABLE.keys() - OF_NODES
    assert 'name="value" min="0" max="1000" step="1" required' in page


def test_forms_have_the_bounds_of_the_table() -> None:
    (value,) = form_fields(TABLE["max_staleness"])
    assert (value.kind, value.least, value.most, value.required, value.step) == ("number", 0, 1000, True, "1")
    name, scope, days = form_fields(TABLE["token"])
    assert (name.kind, name.most, scope.kind, scope.choices) == ("text", 64, "select", get_args(TokenScope))
    assert (days.default, days.required) == (90.0, False)
    (version,) = form_fields(TABLE["evaluate"])
    assert (version.kind, version.required, version.default) == ("number", False, None)
    assert [field.kind for field in form_fields(TABLE["uninvite"])] == ["text", "checkbox"]


async def test_an_action_that_stops_work_is_confirmed_and_logged(browser: Browser, desk: Any) -> None:
    status, page = await browser.post("/actions/pause")
    assert status == 200 and 'id="confirm"' in page and "Yes, do it" in page
    assert await desk.log(limit=5, before=None) == []
    assert await browser.post("/actions/pause", confirmed="yes") == (303, "/actions")
    (record,) = await desk.log(limit=5, before=None)
    assert (record.action, record.via, record.who, record.after) == ("pause", "page", "127.0.0.1", "paused")
    page = await browser.get()
    assert f"/actions/undo/{record.number}" in page and "open → paused" in page
    assert await browser.post(f"/actions/undo/{record.number}") == (303, "/actions")
    assert f'/actions/undo/{record.number}"' not in await browser.get()


async def test_a_setting_is_changed_at_once_and_a_refusal_is_shown(browser: Browser) -> None:
    assert await browser.post("/actions/max_staleness", value="4") == (303, "/actions")
    status, page = await browser.post("/actions/publish_every", value="900")
    assert status == 409 and "Raise the bound first" in page
    status, page = await browser.post("/actions/max_staleness", value="<script>alert(1)</script>")
    assert status == 400 and "<script>alert" not in page
    status, page = await browser.post("/actions/evaluate", version="")
    assert status == 303, "an empty field is left out"


async def test_a_token_is_shown_on_the_page_that_answers_and_never_again(browser: Browser) -> None:
    status, page = await browser.post("/actions/invite", name="<b>Ada</b>", keys="2", days="7")
    assert status == 200
    (token,) = re.findall(r"--token ([\w-]{43})", page)
    assert "<b>Ada" not in page and "&lt;b&gt;Ada" in page
    assert token not in await browser.get()
    status, page = await browser.post("/actions/token", name="ci", scope="read", days="1")
    assert status == 200 and re.search(r"echo_[\w-]{43}", page)
    status, page = await browser.post("/actions/token", name="tenant", scope="use", days="1")
    (secret,) = re.findall(r"TINKER_API_KEY=tml-(echo_[\w-]{43})", page)
    assert status == 200 and f"OPENAI_API_KEY={secret}" in page and "personal data" in page


async def test_a_nodes_button_is_asked_about_by_the_hub_where_no_script_did(
    browser: Browser, source: Any, desk: Any
) -> None:
    node = (await source.nodes())[0].totals.node_id
    status, page = await browser.post("/actions/ban", node=node, confirmed="")
    assert status == 200 and node in page and 'id="confirm"' in page
    assert await browser.post("/actions/ban", node=node, confirmed="yes") == (303, f"/fleet/{node}")
    assert [record.action for record in await desk.log(limit=5, before=None)] == ["ban"]


async def test_forms_of_other_sites_and_without_the_key_do_nothing(
    browser: Browser, open_hub: Any, source: Any, desk: Any
) -> None:
    status, _ = await browser.post("/actions/pause", page_key="0" * 43, confirmed="yes")
    assert status == 403
    status, _ = await browser.post("/actions/undo/1", page_key="")
    assert status == 403
    stranger = await open_hub(source, token="", desk=desk)
    async with stranger.post("/actions/pause", data={"confirmed": "yes"}) as answer:
        assert answer.status == 401
    assert await desk.log(limit=5, before=None) == []


async def test_a_script_with_the_operators_token_sends_forms_too(open_hub: Any, source: Any, desk: Any) -> None:
    script = await open_hub(source, desk=desk)
    node = (await source.nodes())[0].totals.node_id
    async with script.post("/actions/ban", data={"node": node}) as answer:
        assert (answer.status, (await answer.json())["record"]["after"]) == (200, True)
    for path, form, status in (("delete", {"node": node}, 404), ("ban", {}, 400), ("ban", {"node": "nobody"}, 409)):
        async with script.post(f"/actions/{path}", data=form) as answer:
            assert answer.status == status
    async with script.get("/actions/ban") as answer:
        assert answer.status == 405, "a link changes nothing"
