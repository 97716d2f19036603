from __future__ import annotations

import pytest
from aiohttp import ClientSession

from echo_hub.dashboard.headers import SECURITY_HEADERS


def test_scripts_styles_and_forms_are_this_hubs_alone() -> None:
    policy = SECURITY_HEADERS["Content-Security-Policy"]
    directives = dict(part.split(" ", 1) for part in policy.split("; "))
    assert directives["default-src"] == directives["frame-ancestors"] == directives["base-uri"] == "'none'"
    for name in ("script-src", "style-src", "connect-src", "img-src", "form-action"):
        assert directives[name] == "'self'"
    assert "unsafe" not in policy


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS"])
@pytest.mark.parametrize(
    "path", ["/", "/leaderboard", "/login", "/logout", "/api/v1/run", "/api/v1/nowhere", "/static/nothing", "/%2e%2e/x"]
)
async def test_every_answer_has_the_security_headers(hub: ClientSession, method: str, path: str) -> None:
    async with hub.request(method, path, allow_redirects=False) as answer:
        assert SECURITY_HEADERS.items() <= answer.headers.items(), answer.status
        assert "Strict-Transport-Security" not in answer.headers, "this hub has no TLS"
