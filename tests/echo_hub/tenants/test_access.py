"""A real port with a route for tenants: who is admitted, how connections count, and what ends an open request."""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from echo_hub.actions.records import ApiToken, TokenScope
from echo_hub.config.serving_sections import ServerConfig
from echo_hub.dashboard.access.api_tokens import ApiTokens, hash_of, new_api_token
from echo_hub.dashboard.access.attempts import BURST, Attempts
from echo_hub.dashboard.access.guard import Visits
from echo_hub.net import limits
from echo_hub.net.server import Server
from echo_hub.serving.tenant_visits import TenantVisits
from echo_hub.tenants.access import LOOK_S, TenantAccess
from echo_hub.tenants.refusal import Refusal

DEADLINE_S = 20.0


class Door:
    """A server with one route, `/work`. Each request waits until `done` is set."""

    def __init__(self, **settings: Any) -> None:
        self.server = Server(ServerConfig.model_validate({"port": 0, **settings}))
        self.tokens = ApiTokens()
        visits = Visits(place=lambda request: request.remote or "", is_https=lambda _: False)
        self.access = TenantAccess(self.tokens, Attempts(), TenantVisits(visits, self.server.limits))
        self.made: list[ApiToken] = []
        self.done = asyncio.Event()
        self.num_cancelled = 0
        self._inside = asyncio.Queue[str]()

    async def let_in(self, number: int) -> None:
        """Wait until the server has begun to handle `number` more requests of `/work`."""
        for _ in range(number):
            await self._inside.get()

    async def answer(self, request: web.Request) -> web.Response:
        try:
            async with self.access.admitted(request) as tenant_id:
                if "wait" in request.query:
                    self._inside.put_nowait(tenant_id)
                    try:
                        await self.done.wait()
                    except asyncio.CancelledError:
                        self.num_cancelled += 1
                        raise
                if "late" in request.query:
                    raise TimeoutError("the work's own")
                return web.Response(text=tenant_id)
        except TimeoutError as error:
            return web.Response(text=str(error), status=504)
        except Refusal as refusal:
            return web.json_response({"kind": refusal.kind, "text": str(refusal), "retry": refusal.retry_after_s})

    def token(self, name: str, scope: TokenScope = "use", *, days: float = 1.0) -> str:
        secret = new_api_token()
        number, now = len(self.made) + 1, time.time()
        self.made.append(
            ApiToken(
                token_id=number,
                name=name,
                scope=scope,
                token_hash=hash_of(secret),
                created_at=now,
                expires_at=now + days * 86_400,
            )
        )
        self.tokens.renew(self.made)
        return secret


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    one = Door()
    await one.server.open([web.get("/work", one.answer)])
    yield one
    one.done.set()
    await one.server.close()


@pytest.fixture
async def http(door: Door) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(door.server.url, timeout=aiohttp.ClientTimeout(DEADLINE_S)) as session:
        yield session


async def asked(http: aiohttp.ClientSession, headers: dict[str, str], query: str = "") -> Any:
    async with http.get(f"/work{query}", headers=headers) as answer:
        return await (answer.json() if answer.content_type == "application/json" else answer.text())


def key(secret: str) -> dict[str, str]:
    return {"X-API-Key": f"tml-{secret}"}


async def test_both_spellings_and_both_headers_open_the_door(door: Door, http: aiohttp.ClientSession) -> None:
    secret = door.token("Ada")
    for given in (secret, f"tml-{secret}"):
        assert await asked(http, {"X-API-Key": given}) == "Ada"
        assert await asked(http, {"Authorization": f"Bearer {given}"}) == "Ada"
        basic = b64encode(f"x:{given}".encode()).decode()
        assert await asked(http, {"Authorization": f"Basic {basic}"}) == "Ada"
    for broken in ("Basic", "Basic %%%", "Basic /w==", f"Digest {secret}"):
        assert (await asked(http, {"Authorization": broken}))["kind"] == "unauthorized"


@pytest.mark.parametrize("scope", ["read", "operate", "admin"])
async def test_an_operators_token_does_not_open_it(door: Door, http: aiohttp.ClientSession, scope: TokenScope) -> None:
    told = await asked(http, key(door.token("ops", scope)))
    assert told["kind"] == "forbidden" and f"scope {scope}" in told["text"] and "scope use" in told["text"]


async def test_wrong_tokens_are_slowed_down_and_valid_ones_are_not(door: Door, http: aiohttp.ClientSession) -> None:
    secret = door.token("Ada")
    assert (await asked(http, {}))["kind"] == "unauthorized", "a request without a token guesses nothing"
    wrongs = ("tml-tml-" + secret, secret[:-1], "tml-" + secret + "x", "x" * 5_000, "echo_")
    assert len(wrongs) == BURST
    for wrong in ("", "tml-", *wrongs):
        assert (await asked(http, {"X-API-Key": wrong}))["kind"] == "unauthorized"
    told = await asked(http, key(secret[:-1]))
    assert told["kind"] == "too_many" and 0 < told["retry"] <= 60
    assert await asked(http, key(secret)) == "Ada"


async def test_a_revoked_token_ends_requests_that_wait(door: Door, http: aiohttp.ClientSession) -> None:
    revoked, kept = door.token("Ada"), door.token("Bob")
    waiting = [asyncio.create_task(asked(http, key(secret), "?wait")) for secret in (revoked, revoked, kept)]
    await door.let_in(3)
    began = time.monotonic()
    door.tokens.renew([replace(one, revoked_at=1.0) if one.name == "Ada" else one for one in door.made])
    told = await asyncio.gather(*waiting[:2])
    assert [one["kind"] for one in told] == ["unauthorized"] * 2 and door.num_cancelled == 2
    assert time.monotonic() - began < LOOK_S + 2.0
    assert (await asked(http, key(revoked)))["kind"] == "unauthorized"
    door.done.set()
    assert await waiting[2] == "Bob"


async def test_an_expired_token_ends_requests_that_wait(door: Door, http: aiohttp.ClientSession) -> None:
    secret = door.token("Ada", days=0.5 / 86_400)
    told = await asked(http, key(secret), "?wait")
    assert told["kind"] == "unauthorized" and door.num_cancelled == 1


async def test_a_blocked_tenant_is_refused_at_once(door: Door, http: aiohttp.ClientSession) -> None:
    secret = door.token("Ada")
    waiting = asyncio.create_task(asked(http, key(secret), "?wait"))
    await door.let_in(1)
    door.access.blocked = {"Ada"}
    assert (await waiting)["kind"] == "unauthorized"
    assert "blocked" in (await asked(http, key(secret)))["text"]


async def test_the_works_own_timeout_is_no_refusal(door: Door, http: aiohttp.ClientSession) -> None:
    assert await asked(http, key(door.token("Ada")), "?late") == "the work's own"


async def test_a_tenants_connections_are_not_strangers(
    door: Door, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MOST_OF_TENANT", 3)
    secret = door.token("Ada")
    waiting = [asyncio.create_task(asked(http, key(secret), "?wait")) for _ in range(3)]
    await door.let_in(3)
    assert door.server.limits.num_strangers == 0 and door.server.limits.num_open == 3
    told = await asked(http, key(secret))
    assert told["kind"] == "too_many" and told["retry"]
    door.done.set()
    assert await asyncio.gather(*waiting) == ["Ada"] * 3


async def test_a_tenants_requests_are_not_limited_in_rate() -> None:
    door = Door(requests_per_s_per_address=1)
    await door.server.open([web.get("/work", door.answer)])
    async with aiohttp.ClientSession(door.server.url) as http:
        secret = door.token("Ada")
        assert [await asked(http, key(secret)) for _ in range(20)] == ["Ada"] * 20
        wrong = [await asked(http, {}) for _ in range(20)]
        assert "Too many requests. Try again soon.\n" in wrong
    await door.server.close()
