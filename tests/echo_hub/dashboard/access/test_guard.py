from __future__ import annotations

from http.cookies import SimpleCookie
from typing import Any

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import make_mocked_request

from echo_hub.actions.records import ApiToken, TokenScope
from echo_hub.actions.requests import TABLE
from echo_hub.dashboard.access.api_tokens import hash_of, new_api_token
from echo_hub.dashboard.access.credentials import set_password
from echo_hub.dashboard.access.guard import KEY, TOKEN, Guard, Visits

OPERATORS = ("/", *(f"/api/v1/{name}" for name in ("run", "nodes", "steps", "curves")), "/metrics")
PUBLIC = ("/leaderboard", "/api/v1/leaderboard", "/healthz", "/readyz", "/login", "/static/echo.css")


@pytest.fixture
async def stranger(open_hub: Any, source: Any) -> ClientSession:
    session: ClientSession = await open_hub(source, token="")
    return session


async def logged_in(hub: ClientSession, guard: Guard) -> tuple[str, str]:
    """Log in; return the cookie of the new session, and the key that its forms must contain."""
    async with hub.get(f"/?token={guard.credentials.token}", allow_redirects=False) as answer:
        path, _, key = answer.headers["Location"].partition("#key=")
        assert (answer.status, path) == (303, "/") and len(key) == 43
        (morsel,) = SimpleCookie(answer.headers["Set-Cookie"]).values()
    hub.cookie_jar.clear()
    return f"{morsel.key}={morsel.value}", key


async def cookie_of(hub: ClientSession, guard: Guard) -> str:
    return (await logged_in(hub, guard))[0]


@pytest.mark.parametrize("path", OPERATORS)
async def test_strangers_see_nothing_of_the_operators(stranger: ClientSession, path: str) -> None:
    async with stranger.get(path) as answer:
        assert answer.status == 401 and answer.headers["WWW-Authenticate"].startswith("Bearer")
        assert "echo-hub" not in await answer.text()
    for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": "Basic eDp5"}, {"Cookie": "echo-test=x"}):
        async with stranger.get(path, headers=headers) as answer:
            assert answer.status == 401
    async with stranger.get(path, headers={"Accept": "text/html"}, allow_redirects=False) as answer:
        assert (answer.status, answer.headers["Location"]) == (303, "/login")


@pytest.mark.parametrize("path", OPERATORS)
async def test_a_tenants_token_opens_no_page(stranger: ClientSession, guard: Guard, path: str) -> None:
    secret = new_api_token()
    headers = {"Authorization": f"Bearer {secret}"}
    scopes: tuple[tuple[TokenScope, int], ...] = (("use", 401), ("read", 200))
    for scope, status in scopes:
        token = ApiToken(
            token_id=1, name="Ada", scope=scope, token_hash=hash_of(secret), created_at=0.0, expires_at=float("inf")
        )
        guard.tokens.renew([token])
        async with stranger.get(path, headers=headers) as answer:
            assert answer.status == status


@pytest.mark.parametrize("path", PUBLIC)
async def test_strangers_see_the_public_pages(stranger: ClientSession, path: str) -> None:
    async with stranger.get(path) as answer:
        assert answer.status == 200


async def test_the_address_with_the_token_begins_a_session(stranger: ClientSession, guard: Guard) -> None:
    async with stranger.get(f"/?token={guard.credentials.token}", allow_redirects=False) as answer:
        cookie = answer.headers["Set-Cookie"]
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; ")) and "Secure" not in cookie
        assert guard.credentials.token not in cookie
        assert answer.headers["Cache-Control"] == "no-store"
    jar_sends = {"Cookie": cookie.partition(";")[0]}
    stranger.cookie_jar.clear()
    async with stranger.get("/", headers=jar_sends) as answer:
        assert answer.status == 200
    again = f"/?token={guard.credentials.token}"
    async with stranger.get(again, headers=jar_sends, allow_redirects=False) as answer:
        assert (answer.status, answer.headers["Location"]) == (303, "/"), "the address loses its token in any case"
    async with stranger.get("/?token=wrong") as answer:
        assert answer.status == 401
    async with stranger.get(f"/metrics?token={guard.credentials.token}") as answer:
        assert answer.status == 401, "only a page accepts the token in its address"


async def test_a_new_password_ends_all_sessions(
    stranger: ClientSession, guard: Guard, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    headers = {"Cookie": await cookie_of(stranger, guard)}
    set_password(tmp_path / "operator.password", "a long new password")
    monkeypatch.setattr(guard, "_looked_at", float("-inf"))
    async with stranger.get("/", headers=headers) as answer:
        assert answer.status == 401


async def test_logging_out_ends_the_session_for_good(stranger: ClientSession, guard: Guard) -> None:
    headers = {"Cookie": await cookie_of(stranger, guard), "Sec-Fetch-Site": "same-origin"}
    async with stranger.post("/logout", headers=headers, allow_redirects=False) as answer:
        assert (answer.status, answer.headers["Location"]) == (303, "/login")
        assert "Max-Age=0" in answer.headers["Set-Cookie"]
    async with stranger.get("/", headers=headers) as answer:
        assert answer.status == 401


@pytest.mark.parametrize(
    "forged",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "https://elsewhere.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Sec-Fetch-Site": "same-origin", "Origin": "https://elsewhere.example"},
        {},
    ],
)
async def test_another_sites_form_is_refused_with_any_secrets(
    stranger: ClientSession, guard: Guard, forged: dict[str, str]
) -> None:
    cookie, key = await logged_in(stranger, guard)
    for path in ("/logout", "/actions/pause"):
        async with stranger.post(path, headers={"Cookie": cookie} | forged, data={KEY: key}) as answer:
            assert answer.status == 403 and "not from a page of this hub" in await answer.text()
    async with stranger.get("/", headers={"Cookie": cookie}) as answer:
        assert answer.status == 200


SENT = [
    ("http://hub:8710", "hub:8710", False, True),
    ("http://hub:8711", "hub:8710", False, False),
    ("http://hub", "hub:80", False, True),
    ("https://hub", "hub", False, False),
    ("http://hub", "hub", True, False),
    ("https://hub", "hub", True, True),
    ("https://hub:443", "hub", True, True),
    ("https://hub:8443", "hub:443", True, False),
    ("https://HUB", "hub", True, True),
    ("https://hub.example", "hub", True, False),
    ("https://hub:x", "hub:x", True, False),
    ("http://[::1]:8710", "[::1]:8710", False, True),
]


@pytest.mark.parametrize(("origin", "host", "is_https", "is_own"), SENT)
def test_scheme_host_and_port_are_compared(
    guard: Guard, monkeypatch: pytest.MonkeyPatch, origin: str, host: str, is_https: bool, is_own: bool
) -> None:
    monkeypatch.setattr(guard, "visits", Visits(place=lambda _: "x", is_https=lambda _: is_https))
    request = make_mocked_request("POST", "/", headers={"Host": host, "Origin": origin})
    assert guard.is_from_own_page(request) is is_own


async def test_a_session_alone_changes_nothing(open_hub: Any, source: Any, desk: Any, guard: Guard) -> None:
    """Another server on the hub's host, at another port, receives the session's cookie and can send any headers.
    Without the session's key it must not be able to change anything."""
    hub = await open_hub(source, token="", desk=desk)
    cookie = await cookie_of(hub, guard)
    own = {"Cookie": cookie, "Origin": str(hub._base_url).rstrip("/"), "Sec-Fetch-Site": "same-origin"}
    _, others_key = await logged_in(hub, guard)
    paths = [*(f"/actions/{name}" for name in TABLE), "/actions/undo/1", *(f"/api/v1/actions/{name}" for name in TABLE)]
    for path in paths:
        for form in ({}, {KEY: ""}, {KEY: others_key}, {KEY: "é"}, {TOKEN: "wrong"}, {KEY: cookie.partition("=")[2]}):
            async with hub.post(path, headers=own, data={"name": "x", "confirmed": "yes", **form}) as answer:
                assert answer.status == 403, path
    assert await desk.log(limit=9, before=None) == [] and await desk.tokens() == []
    async with hub.post("/actions/pause", headers=own | {"Accept": "text/html"}) as answer:
        assert answer.status == 403 and 'href="/login"' in await answer.text(), "a person is told what to do"


@pytest.mark.parametrize(
    "path", ["/", "/login", "/fleet", "/actions", "/rollouts", "/log", "/api/v1/run", "/static/key.js"]
)
async def test_no_answer_holds_a_key(hub: ClientSession, guard: Guard, stranger: ClientSession, path: str) -> None:
    cookie, key = await logged_in(stranger, guard)
    headers = {"Cookie": cookie, "Accept": "text/html"}
    async with stranger.get(path, headers=headers, allow_redirects=False) as answer:
        assert key not in await answer.text() and key not in str(answer.headers)


async def test_the_key_or_the_hubs_token_is_good_for_a_form(
    open_hub: Any, source: Any, desk: Any, guard: Guard
) -> None:
    """Pages without JavaScript cannot insert the session's key, so their forms may contain the operator's token
    instead.
    """
    hub = await open_hub(source, token="", desk=desk)
    cookie, key = await logged_in(hub, guard)
    own = {"Cookie": cookie, "Sec-Fetch-Site": "same-origin", "Accept": "text/html"}
    for action, shown in (("pause", {KEY: key}), ("resume", {KEY: "", TOKEN: f" {guard.credentials.token} "})):
        async with hub.post(
            f"/actions/{action}", headers=own, data={**shown, "confirmed": "yes"}, allow_redirects=False
        ) as answer:
            assert answer.status == 303, await answer.text()
    records = await desk.log(limit=9, before=None)
    assert [(record.action, record.request) for record in records] == [("resume", {}), ("pause", {})]


async def test_public_answers_hold_nothing_private(stranger: ClientSession, hub: ClientSession, source: Any) -> None:
    source.problems = ("The learner of host seven is down.",)
    nodes, run = await source.nodes(), await source.run_view()
    private = {
        *source.problems,
        *(node.totals.node_id for node in nodes),
        *(node.totals.device for node in nodes),
        *(f'"{field}"' for field in ("cost", "backend", "device", "received", "dropped", "events", "capacity")),
        *(event.text for event in run.events if event.warning),
        "0.125",  # Cost of the run.
        run.run_id,
        run.capacity.verdict,
    }
    asked = [*PUBLIC, *(f"/leaderboard?node={node.totals.node_id[:10]}" for node in nodes), "/leaderboard?sort=seen"]
    for path in asked:
        async with stranger.get(path) as answer:
            text = await answer.text()
        assert {what for what in private if what in text} == set(), path
    shown = ""
    for path in OPERATORS:
        async with hub.get(path) as answer:
            shown += await answer.text()
    assert {what for what in private if what not in shown} <= {'"backend"'}, "the operator sees all of it"


async def test_a_rotated_token_ends_all_sessions(stranger: ClientSession, guard: Guard) -> None:
    before, headers = guard.credentials.token, {"Cookie": await cookie_of(stranger, guard)}
    guard.rotate_token()
    for wrong in (headers, {"Authorization": f"Bearer {before}"}):
        async with stranger.get("/", headers=wrong) as answer:
            assert answer.status == 401
    async with stranger.get("/", headers={"Authorization": f"Bearer {guard.credentials.token}"}) as answer:
        assert answer.status == 200
