from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from echo_hub.actions.records import Actor, ApiToken
from echo_hub.actions.requests import AnyRequest, BlockTenant, MakeToken, SetTenantQuota, UnblockTenant
from echo_hub.config.serving_sections import ServerConfig
from echo_hub.dashboard.access.api_tokens import ApiTokens
from echo_hub.dashboard.access.attempts import Attempts
from echo_hub.dashboard.access.guard import Visits
from echo_hub.net.server import Server
from echo_hub.serving.tenant_visits import TenantVisits
from echo_hub.store.actions import note_action
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.store import Store
from echo_hub.tenants.access import TenantAccess
from echo_hub.tenants.own_limits import OwnLimitsWatch
from echo_hub.tenants.quotas import Quotas, TenantLimits

LIMITS = TenantLimits(tokens_per_day=100, max_queued=7)


class Office:
    """A database, and the parts of a hub that apply an operator's decisions about tenants."""

    def __init__(self, path: Path) -> None:
        self.store = AsyncStore(Store.open(f"sqlite:///{path / 'echo.db'}"))
        visits = Visits(place=lambda _: "", is_https=lambda _: False)
        limits = Server(ServerConfig(port=0)).limits
        self.tokens = ApiTokens()
        self.access = TenantAccess(self.tokens, Attempts(), TenantVisits(visits, limits))
        self.quotas = Quotas(LIMITS)
        self.drawing: set[str] = set()
        self.watch = OwnLimitsWatch(self.store, LIMITS, access=self.access, samples=self)

    def drawing_tenants(self) -> set[str]:
        return set(self.drawing)

    async def stop_drawing(self, tenant_id: str) -> None:
        self.drawing.remove(tenant_id)

    def has_tokens(self, *names: str) -> None:
        now = time.time()
        self.tokens.renew(
            ApiToken(token_id=number, name=name, scope="use", token_hash=name, created_at=now, expires_at=now + 3_600)
            for number, name in enumerate(names)
        )

    async def decide(self, request: AnyRequest) -> None:
        await self.store.write(note_action, request, Actor(via="cli", who="ada"), time.time())


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    one = Office(tmp_path)
    await one.decide(MakeToken(name="Ada", scope="use"))
    yield one
    await one.store.close()


async def test_quotas_and_blocks_hold_until_they_are_taken_back(office: Office) -> None:
    await office.decide(SetTenantQuota(tenant="Ada", tokens_per_day=5))
    await office.decide(BlockTenant(tenant="Ada"))
    await office.watch.look()
    assert office.quotas.limits_of("Ada") == TenantLimits(tokens_per_day=5, max_queued=7)
    assert "Ada" in office.access.blocked and office.quotas.limits_of("Bob") == LIMITS
    await office.decide(UnblockTenant(tenant="Ada"))
    await office.decide(SetTenantQuota(tenant="Ada"))
    await office.watch.look()
    assert "Ada" not in office.access.blocked and office.quotas.limits_of("Ada") == LIMITS


async def test_samples_stop_when_a_tenant_loses_its_access(office: Office) -> None:
    office.has_tokens("Ada", "Bob")
    office.drawing = {"Ada", "Bob"}
    await office.watch.stop_unserved()
    assert office.drawing == {"Ada", "Bob"}
    await office.decide(BlockTenant(tenant="Ada"))
    await office.watch.look()
    await office.watch.stop_unserved()
    assert office.drawing == {"Bob"}
    office.has_tokens("Ada")
    await office.watch.stop_unserved()
    assert office.drawing == set()


async def test_a_running_hub_notices_a_command_by_itself(office: Office) -> None:
    watching = asyncio.create_task(office.watch.run())
    await office.decide(BlockTenant(tenant="Ada"))
    async with asyncio.timeout(20):
        while "Ada" not in office.access.blocked:  # noqa: ASYNC110  # The watch looks once a second.
            await asyncio.sleep(0.05)
    watching.cancel()
