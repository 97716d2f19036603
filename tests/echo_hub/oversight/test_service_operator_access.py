"""Routes of a real hub: those in `PUBLIC` need no login, all others need the operator's."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import ClientSession, CookieJar, web

from echo_hub.config.sections import HubConfig
from echo_hub.dashboard.access.guard import PUBLIC
from echo_hub.dashboard.headers import SECURITY_HEADERS
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.serving.hub import Hub
from echo_hub.serving.opening import open_hub


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[Hub]:
    directory = RunDirectory(tmp_path / "run")
    config = HubConfig.model_validate({"server": {"port": 0}})
    make_run(directory, config)
    async with open_hub(config, directory) as opened:
        yield opened


def canonical(path: str) -> str:
    return re.sub(r"{(\w+)(?::[^}]*)?}", r"{\1}", path)


def routes(hub: Hub) -> list[tuple[str, str]]:
    """Return (method, path) of each route; a route for GET also answers HEAD."""
    found = []
    for route in hub.server.routes:
        assert isinstance(route, web.RouteDef)
        found.append((route.method, canonical(route.path)))
        if route.method == "GET" and route.kwargs.get("allow_head", True):
            found.append(("HEAD", canonical(route.path)))
    return found


async def test_every_unlisted_route_is_only_for_the_operator(hub: Hub) -> None:
    walked = routes(hub)
    assert {path for _, path in walked} >= PUBLIC, "every listed path exists"
    assert len({path for _, path in walked} - PUBLIC) >= 8
    async with ClientSession(hub.url) as stranger:
        for method, path in walked:
            async with stranger.request(method, re.sub(r"{\w+}", "x", path), allow_redirects=False) as answer:
                assert (answer.status == 401) == (path not in PUBLIC), (method, path, answer.status)
                assert SECURITY_HEADERS.items() <= answer.headers.items(), (method, path)
    async with ClientSession(hub.url, headers={"Authorization": f"Bearer {hub.guard.credentials.token}"}) as operator:
        for method, path in walked:
            async with operator.request(method, re.sub(r"{\w+}", "x", path), allow_redirects=False) as answer:
                assert answer.status != 401, (method, path)


async def test_the_printed_address_logs_in_until_a_password_is_set(hub: Hub) -> None:
    async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as browser, browser.get(hub.dashboard_url) as answer:
        assert (answer.status, str(answer.url)) == (200, f"{hub.url}/")
    hub.directory.operator_password.write_text("")
    assert hub.dashboard_url == f"{hub.url}/"
