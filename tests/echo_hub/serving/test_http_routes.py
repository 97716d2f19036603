"""Routes of a real hub for tenants: `tinker.enabled` opens them, and each request needs a token of a tenant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from echo_hub.config.sections import HubConfig
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.serving.opening import open_hub

CAPABILITIES = "/tinker/api/v1/get_server_capabilities"


def settings(*, enabled: bool) -> HubConfig:
    tenants: dict[str, Any] = {"tinker": {"enabled": True, "aliases": {"a/b": "base"}}, "task": {"name": "none"}}
    sections: dict[str, Any] = {"server": {"port": 0}, "tenants": {"drawn_by": "hub"}}
    return HubConfig.model_validate(sections | (tenants if enabled else {}))


@pytest.mark.parametrize(("enabled", "status"), [(True, 401), (False, 404)])
async def test_the_tinker_api_is_open_only_if_enabled(tmp_path: Path, enabled: bool, status: int) -> None:
    config, directory = settings(enabled=enabled), RunDirectory(tmp_path / "run")
    make_run(directory, config)
    async with open_hub(config, directory) as hub, aiohttp.ClientSession(hub.url) as anyone:
        for headers in ({}, {"X-API-Key": f"tml-{hub.guard.credentials.token}"}, {"X-API-Key": "tml-wrong"}):
            async with anyone.get(CAPABILITIES, headers=headers) as answer:
                assert answer.status == status
        async with anyone.get("/tinker/api/v1/nothing") as answer:
            assert answer.status == 404
        async with anyone.get("/operator", allow_redirects=False) as answer:
            assert answer.status in (401, 404), "other pages stay the operator's"
