"""The hub's four services, and which of them carries out which action."""

from __future__ import annotations

import asyncio
from typing import assert_never

from echo_hub.core.accounting.effects import (
    Action,
    AnnounceVersion,
    BeginStep,
    CheckRollout,
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
from echo_hub.distribution.service import DistributionService
from echo_hub.driving.shared import Shared
from echo_hub.intake.partials import Partials
from echo_hub.intake.service import IntakeService
from echo_hub.net.server import Server
from echo_hub.oversight.service import OversightService
from echo_hub.training.own_sampler import OwnSampler
from echo_hub.training.service import TrainingService


class HubServices:
    """The services intake, training, distribution and oversight. Each service gets, at its creation, the other services
    that it uses."""

    def __init__(self, shared: Shared, *, partials: Partials, server: Server) -> None:
        config = shared.resources.config
        own_sampler = OwnSampler(config.training, shared.queue) if config.run.mode == "colocated" else None
        self.distribution = DistributionService(shared, own_sampler)
        self.training = TrainingService(shared, self.distribution, own_sampler)
        self.intake = IntakeService(shared, partials, distribution=self.distribution, training=self.training)
        self.oversight = OversightService(
            shared, server, intake=self.intake, training=self.training, distribution=self.distribution
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
                | SendCheck()
                | TellStandby()
            ):
                self.intake.handle(action)
            case _:
                assert_never(action)

    async def run(self) -> None:
        """Run all services until cancelled. If one of them raises an error, all end."""
        async with asyncio.TaskGroup() as tasks:
            for work in (self.intake.run(), self.training.run(), self.distribution.run(), self.oversight.run()):
                tasks.create_task(work)
