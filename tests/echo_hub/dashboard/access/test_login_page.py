from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from echo_hub.dashboard.access.attempts import BURST
from echo_hub.dashboard.access.credentials import OperatorCredentials, set_password
from echo_hub.dashboard.access.login_page import MOST_BYTES

PASSWORD = "correct horse battery staple"
OWN = {"Sec-Fetch-Site": "same-origin"}


@pytest.fixture
async def stranger(open_hub: Any, source: Any) -> ClientSession:
    session: ClientSession = await open_hub(source, token="")
    return session


async def log_in(hub: ClientSession, secret: str, **headers: str) -> tuple[int, str]:
    sent = {**OWN, **headers}
    async with hub.post("/login", data={"secret": secret}, headers=sent, allow_redirects=False) as answer:
        return answer.status, answer.headers.get("Set-Cookie", "")


async def test_the_token_and_the_password_log_in(stranger: ClientSession, guard: Any, tmp_path: Path) -> None:
    assert (await log_in(stranger, "wrong"))[0] == (await log_in(stranger, ""))[0] == 403
    assert (await log_in(stranger, f" {guard.credentials.token}\n"))[0] == 303
    assert (await log_in(stranger, PASSWORD))[0] == 403
    set_password(tmp_path / "operator.password", PASSWORD)
    async with stranger.get("/login") as answer:
        assert "Password, or the hub's token" in await answer.text()
    status, cookie = await log_in(stranger, PASSWORD)
    assert status == 303 and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    async with stranger.get("/login", headers={"Cookie": cookie.partition(";")[0]}) as answer:
        assert answer.status == 200 and 'id="secret"' in await answer.text(), "a browser may have lost its key"


async def test_guessing_is_delayed_and_the_token_still_logs_in(
    stranger: ClientSession, guard: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_password(tmp_path / "operator.password", PASSWORD)
    verified = []

    async def counted(_self: OperatorCredentials, given: str) -> bool:
        verified.append(given)
        return False

    monkeypatch.setattr(OperatorCredentials, "is_password", counted)
    statuses = [(await log_in(stranger, f"guess {number}"))[0] for number in range(BURST + 4)]
    assert statuses == [403] * BURST + [429] * 4
    assert len(verified) == BURST, "refused attempts cost no hash"
    assert (await log_in(stranger, guard.credentials.token))[0] == 303


@pytest.mark.parametrize("headers", [{"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://elsewhere.example"}])
async def test_another_site_cannot_log_anybody_in(stranger: ClientSession, guard: Any, headers: dict[str, str]) -> None:
    status, cookie = await log_in(stranger, guard.credentials.token, **headers)
    assert (status, cookie) == (403, "")


async def test_a_post_that_is_not_the_pages_form_is_not_read(stranger: ClientSession, guard: Any) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded", **OWN}
    for body, headers in (
        (b"secret=" + b"x" * MOST_BYTES, form),
        (b"{}", {**OWN, "Content-Type": "application/json"}),
        (b"secret=x", {**form, "Content-Type": "multipart/form-data; boundary=x"}),
    ):
        async with stranger.post("/login", data=body, headers=headers) as answer:
            assert answer.status == 400
    async with stranger.post("/login", data=b"secret=%ff%00", headers=form) as answer:
        assert answer.status == 403


async def test_by_tls_the_cookie_is_bound_to_the_host(stranger: ClientSession, guard: Any) -> None:
    object.__setattr__(guard.visits, "is_https", lambda _: True)
    status, cookie = await log_in(stranger, guard.credentials.token)
    assert status == 303 and cookie.startswith("__Host-echo-test=") and "Secure" in cookie
