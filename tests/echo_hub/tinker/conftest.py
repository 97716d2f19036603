"""Fixtures: a port with the Tinker API over a real tenants' service, whose models need no torch."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from echo_hub.actions.records import ApiToken
from echo_hub.actions.tenant_keys import tinker_key
from echo_hub.config.serving_sections import ServerConfig
from echo_hub.dashboard.access.api_tokens import ApiTokens, hash_of, new_api_token
from echo_hub.dashboard.access.attempts import Attempts
from echo_hub.dashboard.access.guard import Visits
from echo_hub.net.server import Server
from echo_hub.serving.tenant_visits import TenantVisits
from echo_hub.tenants.access import TenantAccess
from echo_hub.tenants.service import TenantService
from echo_hub.tinker.routes import routes
from echo_hub.tinker.wire import TinkerWire
from tests.doors import doors_python
from tests.echo_hub.tenants.conftest import TenantHub

CLIENT = Path(__file__).with_name("sdk_client.py")


@dataclass
class TinkerDoor:
    """A served Tinker API, with its address and a tenant's token."""

    url: str
    key: str
    other_key: str
    service: TenantService
    wire: TinkerWire

    async def run_sdk(self, *names: str, url: str = "", timeout_s: float = 120.0, **environment: str) -> dict[str, Any]:
        """Run programs of sdk_client.py, and return their results."""
        variables = {
            **os.environ,
            "TINKER_BASE_URL": url or f"{self.url}/tinker",
            "TINKER_API_KEY": self.key,
            "HF_HUB_OFFLINE": "1",
            **environment,
        }
        process = await asyncio.create_subprocess_exec(
            str(doors_python()),
            str(CLIENT),
            *names,
            env=variables,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, errors = await asyncio.wait_for(process.communicate(), timeout_s)
        except TimeoutError:
            process.kill()
            out, errors = await process.communicate()
            raise AssertionError(f"the SDK did not end: {errors.decode()[-4_000:]}") from None
        assert process.returncode == 0, errors.decode()[-4_000:]
        found: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
        return found


@asynccontextmanager
async def opened(hub: TenantHub) -> AsyncIterator[TinkerDoor]:
    """Serve the Tinker API of a hub."""
    async with hub.serving() as service:
        server, tokens, secrets = Server(ServerConfig(port=0)), ApiTokens(), [new_api_token(), new_api_token()]
        now = time.time()
        tokens.renew(
            ApiToken(
                token_id=number,
                name=name,
                scope="use",
                token_hash=hash_of(secret),
                created_at=now,
                expires_at=now + 3_600,
            )
            for number, (name, secret) in enumerate(zip(("ada", "bob"), secrets, strict=True))
        )
        visits = Visits(place=lambda request: request.remote or "", is_https=lambda _: False)
        access = TenantAccess(tokens, Attempts(), TenantVisits(visits, server.limits))
        wire = TinkerWire(service=service, access=access, address=visits.address)
        await server.open(routes(wire))
        try:
            yield TinkerDoor(server.url, tinker_key(secrets[0]), tinker_key(secrets[1]), service, wire)
        finally:
            await server.close()


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[TinkerDoor]:
    async with opened(TenantHub(tmp_path)) as one:
        yield one
