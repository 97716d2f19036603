"""The hub's five services, and which of them carries out which action."""

from __future__ import annotations

import asyncio
from typing import assert_never

from echo_hub.core.accounting.effects import (
    Action,
    AnnounceVersion,
    BeginStep,
    CheckRollout,
    CloseSession,
    DeliverAnswer,
    EvaluationDone,
    FinishRun,
    HandOver,
    HastenChecks,
    LookUpReceipt,
    MeasureNumerics,
    PrepareGroup,
    PublishVersion,
    RevokeLease,
    ScoreRollout,
    SendCheck,
    SendLease,
    SendReceipts,
    SendTrained,
    TellOperator,
    TellStandby,
    TrainStep,
)
from echo_hub.dashboard.access.attempts import Attempts
from echo_hub.distribution.service import DistributionService
from echo_hub.driving.shared import Shared
from echo_hub.intake.partials import Partials
from echo_hub.intake.service import IntakeService
from echo_hub.net.server import Server
from echo_hub.oversight.service import OversightService
from echo_hub.serving.tenant_visits import TenantVisits
from echo_hub.serving.tenants import limits_of, node_drawer, tenant_service
from echo_hub.tenants.access import TenantAccess
from echo_hub.tenants.own_limits import OwnLimitsWatch
from echo_hub.tenants.service import TenantService
from echo_hub.training.own_sampler import OwnSampler
from echo_hub.training.service import TrainingService


class HubServices:
    """The services intake, training, distribution, oversight and, if the hub serves tenants, tenants. Each service
    gets, at its creation, the other services that it uses."""

    def __init__(self, shared: Shared, *, partials: Partials, server: Server) -> None:
        config = shared.resources.config
        own_sampler = OwnSampler(config.training, shared.queue) if config.run.mode == "colocated" else None
        self.distribution = DistributionService(shared, own_sampler)
        self.training = TrainingService(shared, self.distribution, own_sampler)
        self.intake = IntakeService(shared, partials, distribution=self.distribution, training=self.training)
        self.oversight = OversightService(
            shared, server, intake=self.intake, training=self.training, distribution=self.distribution
        )
        self.drawer = node_drawer(shared, self.intake, self.distribution)
        self.tenants: TenantService | None = None
        self.access: TenantAccess | None = None
        """Admits tenants' requests; None if the hub serves no tenants."""
        if config.serves_tenants:
            self.tenants = tenant_service(shared, scorer=self.intake.scores, nodes=self.drawer)
            guard = self.oversight.guard
            self.access = TenantAccess(guard.tokens, Attempts(), TenantVisits(guard.visits, server.limits))
            self._own_limits = OwnLimitsWatch(
                shared.resources.store, limits_of(config.tenants), access=self.access, samples=self.tenants
            )

    def handle(self, action: Action) -> None:
        """Pass an action to the service that carries it out. Some actions concern two services."""
        match action:
            case AnnounceVersion():
                self.intake.handle(action)
                self.distribution.handle(action)
            case PublishVersion():
                self.distribution.handle(action)
                self.oversight.handle(action)
            case HandOver() | BeginStep() | TrainStep() | EvaluationDone() | FinishRun():
                self.training.handle(action)
            case CheckRollout() | MeasureNumerics() | HastenChecks() | TellOperator():
                self.oversight.handle(action)
            case (
                PrepareGroup()
                | SendLease()
                | RevokeLease()
                | SendReceipts()
                | SendTrained()
                | LookUpReceipt()
                | ScoreRollout()
                | CloseSession()
                | SendCheck()
                | DeliverAnswer()
                | TellStandby()
            ):
                self.intake.handle(action)
            case _:
                assert_never(action)

    async def open(self) -> None:
        """Resume tenants' unfinished work. Call this before the port is open: until tokens and limits are loaded, the
        hub would refuse or admit tenants by mistake.
        """
        if self.tenants is not None:
            await self.oversight.desk.renew_tokens()
            await self._own_limits.look()
            await self.tenants.open()

    async def close(self) -> None:
        """Stop the process of tenants' models. Call this after `run` has ended."""
        if self.tenants is not None:
            await self.tenants.close()

    async def run(self) -> None:
        """Run all services until cancelled. If one of them raises an error, all end."""
        async with asyncio.TaskGroup() as tasks:
            for work in (self.intake.run(), self.training.run(), self.distribution.run(), self.oversight.run()):
                tasks.create_task(work)
            if self.drawer is not None:
                tasks.create_task(self.drawer.run())
            if self.tenants is not None:
                tasks.create_task(self.tenants.run())
                tasks.create_task(self._own_limits.run())
