"""Fixtures: a tenants' service over an SQLite file, with models that need no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from echo_hub.config.tenants_section import TenantsConfig
from echo_hub.run.directory import RunDirectory
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.store import Store
from echo_hub.tenants.building import build_tenant_service
from echo_hub.tenants.computing import ComputerHost
from echo_hub.tenants.core import Offer, TenantCore
from echo_hub.tenants.hub_drawer import HubDrawer
from echo_hub.tenants.outcomes import OfferedModel, Outcome, Pending
from echo_hub.tenants.quotas import Quotas, TenantLimits
from echo_hub.tenants.sampling_limits import SamplingFacts
from echo_hub.tenants.service import TenantService
from tests.echo_hub.tenants.small_models import SmallStarter

FACTS = SamplingFacts(vocabulary_size=1_000, context_tokens=64, stop_ids=frozenset({2}))


class NoVersions:
    """Stand-in for the versions of the run's own training: 1, 2 and 3."""

    name = "my-run"

    def newest(self) -> int:
        return 3

    def has(self, policy_version: int) -> bool:
        return 1 <= policy_version <= 3


@dataclass
class TenantHub:
    """The files and the database that a hub keeps on disk. Each `serving` starts a hub that uses them."""

    root: Path
    config: TenantsConfig = field(default_factory=TenantsConfig)
    limits: TenantLimits = field(default_factory=TenantLimits)
    starter: SmallStarter = field(default_factory=SmallStarter)
    database_url: str = ""
    """URL of the database; empty = an SQLite file in `root`."""

    @property
    def url(self) -> str:
        return self.database_url or f"sqlite:///{self.root / 'echo.db'}"

    @asynccontextmanager
    async def serving(self, *, killed: bool = False) -> AsyncIterator[TenantService]:
        """Serve until the context ends. If `killed`, end like a killed hub: finish nothing, and lose the memory."""
        store = AsyncStore(Store.open(self.url))
        directory = RunDirectory(self.root)
        host = ComputerHost(self.starter, first_wait_s=0.001)
        core = TenantCore.of(directory, store, quotas=Quotas(self.limits), host=host, drawer=HubDrawer(host, directory))
        alias = OfferedModel(name="Qwen/Qwen3-8B", max_context_length=64, trainable=True)
        offer = Offer(models=(alias,), facts=FACTS, secret="secret")
        service = build_tenant_service(self.config, core, offer, NoVersions())
        await service.open()
        work = asyncio.create_task(service.run())
        try:
            yield service
        finally:
            work.cancel()
            ended = await asyncio.gather(work, return_exceptions=True)
            if not killed:
                await service.close()
            await store.close()
            assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended


@pytest.fixture
def tenant_hub(tmp_path: Path) -> TenantHub:
    return TenantHub(tmp_path)


@pytest.fixture(params=["sqlite", "postgresql"])
def hub_of_each(request: pytest.FixtureRequest, tmp_path: Path) -> TenantHub:
    """A hub with each kind of database."""
    is_file = request.param == "sqlite"
    return TenantHub(tmp_path, database_url="" if is_file else request.getfixturevalue("postgresql_without_rows"))


async def ended(service: TenantService, request_id: str, tenant_id: str = "ada") -> Outcome:
    """Return the outcome of a request once there is one."""
    outcome = await service.outcome(tenant_id, request_id, wait_s=10.0)
    assert not isinstance(outcome, Pending), outcome
    return outcome
