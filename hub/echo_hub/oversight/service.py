"""The oversight service: checks rollouts, carries out the operator's actions, watches the run, and serves the pages."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import assert_never

from aiohttp import web

from echo_hub.cluster.model_processes import process_of
from echo_hub.config.sections import HubConfig
from echo_hub.core.accounting.effects import (
    CheckRollout,
    HastenChecks,
    MeasureNumerics,
    OversightAction,
    PublishVersion,
    TellOperator,
)
from echo_hub.dashboard.access.credentials import OperatorCredentials
from echo_hub.dashboard.access.guard import Guard, Visits
from echo_hub.distribution.service import DistributionService
from echo_hub.driving.shared import Shared
from echo_hub.intake.episodes import DrawnRollouts
from echo_hub.intake.service import IntakeService
from echo_hub.lifecycle.retention import Retention
from echo_hub.lifecycle.sibling_runs import SiblingRuns
from echo_hub.net.client_address import client_ip, is_https, place_of
from echo_hub.net.own_address import requested_address
from echo_hub.net.server import Server
from echo_hub.operation.problems import RunProblems
from echo_hub.oversight.housekeeping import Housekeeping, kept_steps
from echo_hub.oversight.moments import Moments
from echo_hub.oversight.operating import Description, Operation, RunObserver
from echo_hub.oversight.operator_desk import Desk
from echo_hub.run.directory import RunDirectory
from echo_hub.sinks.chosen import chosen_sinks
from echo_hub.sinks.following import Following
from echo_hub.training.service import TrainingService
from echo_hub.verify.verifier import Verifier, program, verifier_settings
from echo_hub.verify.verifying import Verifying
from echo_hub.views.evaluations import EvaluationViews
from echo_hub.views.pages_source import HubPages
from echo_hub.views.run import RunViews
from echo_hub.views.versions import VersionViews


class OversightService:
    """Owns the verifier, the operator's desk, the pages, and the periodic work on database and run directory."""

    def __init__(
        self,
        shared: Shared,
        server: Server,
        *,
        intake: IntakeService,
        training: TrainingService,
        distribution: DistributionService,
    ) -> None:
        """`server` is the hub's port; pages and alerts show its address."""
        resources = shared.resources
        config, directory, store = resources.config, resources.directory, resources.store
        self._server = server
        self._verifying = verifying_of(shared, intake.drawn)
        self._sinks = _sinks_of(shared)
        self._siblings = SiblingRuns(
            directory, store, run_id=resources.run_id, hub_key=resources.me.public_key, changes=shared.changes
        )
        problems = RunProblems(
            learner_idle_s=config.alerts.learner_idle_s, disk_free_bytes=config.alerts.disk_free_bytes
        )
        moments = Moments(
            shared,
            intake=intake,
            training=training,
            distribution=distribution,
            verifying=self._verifying,
            problems=problems,
            sinks=self._sinks,
            server=server,
        )
        self.pages = _pages_of(shared, moments, self._siblings)
        observer = RunObserver(directory, store=store, moments=moments, pages=self.pages, changes=shared.changes)
        self.operation = Operation(
            config.alerts,
            driver=shared.driver,
            store=store,
            progress=shared.progress,
            observer=observer,
            pages=self.pages,
            problems=problems,
            description=Description(run_id=resources.run_id, name=config.run.name, server=server),
        )
        self.guard = guard_of(config, directory, run_id=resources.run_id)
        self.desk = Desk(
            store,
            directory,
            guard=self.guard,
            queue=shared.queue,
            due=training.due,
            run_keys=distribution.distributor,
            changes=shared.changes,
        )
        self._housekeeping = _housekeeping_of(shared, intake, training, distribution)
        self._retention = Retention(
            config.keeping.steps,
            store=store,
            coordinator=resources.coordinator,
            answered_days=config.keeping.answered_days,
        )

    def handle(self, action: OversightAction) -> None:
        match action:
            case CheckRollout():
                self._verifying.submit(action.rollout_id, is_urgent=action.is_urgent)
            case MeasureNumerics():
                self._verifying.measure(action.rounding, action.policy_version)
            case HastenChecks():
                self._verifying.hasten()
            case PublishVersion():
                self._verifying.published()
            case TellOperator():
                self.desk.settled(action.number)
            case _:
                assert_never(action)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for work in (
                self._verifying.run(),
                self._housekeeping.run(),
                self._housekeeping.watch_bans(),
                self._housekeeping.watch_pardons(),
                self._retention.run(),
                self.desk.run(),
                self._siblings.run(self._server.shared_url),
                self.operation.run(),
                *(sink.run() for sink in self._sinks),
            ):
                tasks.create_task(work)


def _sinks_of(shared: Shared) -> list[Following]:
    resources = shared.resources
    return chosen_sinks(
        resources.config,
        resources.directory.root,
        resources.run_id,
        resources.store,
        shared.changes,
        codec=resources.codec,
        problems=resources.problems,
    )


def _housekeeping_of(
    shared: Shared, intake: IntakeService, training: TrainingService, distribution: DistributionService
) -> Housekeeping:
    resources = shared.resources
    return Housekeeping(
        resources.config.learner,
        store=resources.store,
        directory=resources.directory,
        coordinator=resources.coordinator,
        queue=shared.queue,
        live=shared.live,
        evaluating=training.due.waiting,
        bans=distribution.distributor,
        invitations=resources.invitations,
        nodes=intake.nodes,
    )


def _pages_of(shared: Shared, moments: Moments, siblings: SiblingRuns) -> HubPages:
    resources = shared.resources
    config, store = resources.config, resources.store.store
    return HubPages(
        changes=shared.changes,
        store=store,
        run=RunViews(
            config,
            run_id=resources.run_id,
            started_at=resources.started_at,
            first_version=resources.first_version,
            lineage=resources.start.lineage if resources.start else (),
            store=store,
            versions=VersionViews(store, resources.directory),
            evaluations=EvaluationViews(store, [one.name for one in config.evaluation_sets if one.name]),
            siblings=siblings,
        ),
        nodes=shared.live,
        moments=moments,
    )


def verifying_of(shared: Shared, drawn: DrawnRollouts) -> Verifying:
    """Return the verifier for the run's settings. If the settings choose no verifier process, the verifier refuses all
    checks."""
    resources = shared.resources
    config, directory = resources.config, resources.directory
    settings, kept = verifier_settings(config, resources.learner), config.training.max_staleness + 2
    process = None
    if config.run.mode != "colocated" and config.trust.verifier in ("process", "ray"):
        process = process_of(
            program(settings),
            settings,
            logs=directory.root / "logs",
            cluster=resources.cluster if config.trust.verifier == "ray" else None,
            kept=kept,
        )
    verifier = Verifier(
        process,
        settings,
        directory=directory,
        kept=kept,
        patience=max(1, kept_steps(config.learner) // config.training.publish_every - 1),
        rollouts=drawn,
        gguf=None if resources.gguf is None else (resources.gguf_precision, str(resources.gguf.parts[0].absolute())),
    )
    return Verifying(verifier, shared.queue)


def guard_of(config: HubConfig, directory: RunDirectory, *, run_id: str) -> Guard:
    """Return the guard, which authenticates requests to the operator's pages and API. Raises ConfigError if the
    operator's token can neither be read nor made."""
    proxies = config.server.trusted_proxies
    credentials = OperatorCredentials(token=directory.operator_token, password=directory.operator_password)
    credentials.open()

    def place(request: web.Request) -> str:
        return place_of(client_ip(request, proxies))

    visits = Visits(
        place=place,
        is_https=partial(is_https, trusted_proxies=proxies),
        address=partial(requested_address, settings=config.server),
    )
    return Guard(credentials, visits, name=run_id[:8])
