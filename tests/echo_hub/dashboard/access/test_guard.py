from __future__ import annotations

from http.cookies import SimpleCookie
from typing import Any

import pytest
from aiohttp import ClientSession

from echo_hub.dashboard.access.credentials import set_password
from echo_hub.dashboard.access.guard import Guard

OPERATORS = ("/", *(f"/api/v1/{name}" for name in ("run", "nodes", "steps", "curves")), "/metrics")
PUBLIC = ("/leaderboard", "/api/v1/leaderboard", "/healthz", "/readyz", "/login", "/static/echo.css")


@pytest.fixture
async def stranger(open_hub: Any, source: Any) -> ClientSession:
    session: ClientSession = await open_hub(source, token="")
    return session


async def cookie_of(hub: ClientSession, guard: Guard) -> str:
    async with hub.get(f"/?token={guard.credentials.token}", allow_redirects=False) as answer:
        assert (answer.status, answer.headers["Location"]) == (303, "/")
        (morsel,) = SimpleCookie(answer.headers["Set-Cookie"]).values()
    hub.cookie_jar.clear()
    return f"{morsel.key}={morsel.value}"


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


@pytest.mark.parametrize("path", PUBLIC)
async def test_strangers_see_what_is_public(stranger: ClientSession, path: str) -> None:
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
        assert (answer.status, answer.headers["Location"]) == (303, "/"), "its address is clean in any case"
    async with stranger.get("/?token=wrong") as answer:
        assert answer.status == 401
    async with stranger.get(f"/metrics?token={guard.credentials.token}") as answer:
        assert answer.status == 401, "only the page's address is opened with it"


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
    async with stranger.get("/", headers=headers) as answer:
        token = (await answer.text()).partition('name="form_token" value="')[2].partition('"')[0]
    async with stranger.post("/logout", headers=headers, data={"form_token": token}, allow_redirects=False) as answer:
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
async def test_a_form_of_another_site_is_refused_whatever_it_knows(
    stranger: ClientSession, guard: Guard, forged: dict[str, str]
) -> None:
    cookie = {"Cookie": await cookie_of(stranger, guard)}
    async with stranger.get("/", headers=cookie) as answer:
        token = (await answer.text()).partition('name="form_token" value="')[2].partition('"')[0]
    assert len(token) == 128
    async with stranger.post("/logout", headers=cookie | forged, data={"form_token": token}) as answer:
        assert answer.status == 403
    async with stranger.get("/", headers=cookie) as answer:
        assert answer.status == 200


async def test_a_form_without_the_sessions_token_is_refused(stranger: ClientSession, guard: Guard) -> None:
    headers = {"Cookie": await cookie_of(stranger, guard), "Origin": str(stranger._base_url).rstrip("/")}
    for token in ("", "00" * 64, "é"):
        async with stranger.post("/logout", headers=headers, data={"form_token": token}) as answer:
            assert answer.status == 403


async def test_pages_differ_only_in_the_form_token(hub: ClientSession, guard: Guard, stranger: ClientSession) -> None:
    headers = {"Cookie": await cookie_of(stranger, guard)}
    tokens = set()
    for _ in range(3):
        async with stranger.get("/", headers=headers) as answer:
            text = await answer.text()
        token = text.partition('name="form_token" value="')[2].partition('"')[0]
        tokens.add(token)
        assert text.count(token) == 1, "one form: to log out"
    assert len(tokens) == 3
    async with hub.get("/") as answer:
        assert 'name="form_token" value=""' in await answer.text(), "a script gets none, and needs none"


async def test_public_answers_hold_nothing_private(stranger: ClientSession, hub: ClientSession, source: Any) -> None:
    source.problems = ("The learner of host seven is down.",)
    nodes, run = await source.nodes(), await source.run_view()
    private = {
        *source.problems,
        *(node.totals.node_id for node in nodes),
        *(node.totals.device for node in nodes),
        *(f'"{field}"' for field in ("cost", "backend", "device", "received", "dropped", "events", "capacity")),
        *(event.text for event in run.events if event.warning),
        "0.125",  # What it has cost.
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
