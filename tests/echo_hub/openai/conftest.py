"""Fixtures: a real port with the OpenAI API over the hub's own sampler, and OpenAI's own client for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from echo_hub.actions.records import ApiToken, TokenScope
from echo_hub.config.serving_sections import ServerConfig
from echo_hub.dashboard.access.api_tokens import ApiTokens, hash_of, new_api_token
from echo_hub.dashboard.access.attempts import Attempts
from echo_hub.dashboard.access.guard import Visits
from echo_hub.net.server import Server
from echo_hub.openai.api import OpenAiApi
from echo_hub.openai.base_files import fingerprint_of
from echo_hub.run.base_files import vocabulary_size
from echo_hub.serving.tenant_visits import TenantVisits
from echo_hub.tenants.access import TenantAccess
from tests.echo_hub.openai.hub_sampling import BASE, HubSampling

DEADLINE_S = 20.0


@dataclass(eq=False)
class OpenAiPort:
    """The served OpenAI API. `key` is a tenant's token."""

    url: str
    key: str
    client: AsyncOpenAI
    http: aiohttp.ClientSession
    sampling: HubSampling
    api: OpenAiApi
    tokens: ApiTokens

    async def post(self, path: str, body: Any = None, *, data: Any = None, **headers: str) -> tuple[int, Any]:
        """Send a request of a tenant; return status and body."""
        sent = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json", **headers}
        async with self.http.post(self.url + path, json=body, data=data, headers=sent) as answer:
            return answer.status, await answer.json(content_type=None)


def token_of(name: str, scope: TokenScope = "use") -> tuple[str, ApiToken]:
    secret, now = new_api_token(), time.time()
    return secret, ApiToken(
        token_id=1, name=name, scope=scope, token_hash=hash_of(secret), created_at=now, expires_at=now + 3_600.0
    )


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        for _ in count():
            if holds():
                return
            await asyncio.sleep(0.01)


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> HubSampling:
    return HubSampling.open(tmp_path_factory.mktemp("adapter"))


@pytest.fixture
async def port(loaded: HubSampling) -> AsyncIterator[OpenAiPort]:
    sampling = HubSampling(codec=loaded.codec, policy=loaded.policy, adapter=loaded.adapter)
    server, tokens = Server(ServerConfig(port=0)), ApiTokens()
    visits = Visits(place=lambda request: request.remote or "", is_https=lambda _: False)
    access = TenantAccess(tokens, Attempts(), TenantVisits(visits, server.limits))
    api = OpenAiApi(
        sampling, access, loaded.codec, vocabulary_size=vocabulary_size(BASE), fingerprint=fingerprint_of(BASE)
    )
    await server.open(api.routes)
    secret, token = token_of("ada")
    tokens.renew([token])
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key=secret, max_retries=0)
    async with aiohttp.ClientSession() as http:
        yield OpenAiPort(
            url=server.url, key=secret, client=client, http=http, sampling=sampling, api=api, tokens=tokens
        )
    await client.close()
    await server.close()
