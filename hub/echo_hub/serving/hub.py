"""One hub: its components, made in order, each given what it needs of those before it, and their tasks.

Data's way: doors → connected nodes → driver (coordinator, store) → actions → handing out, scorer, trainer,
publishing; what these find out goes back to the driver as events. Nothing else talks to the coordinator.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import assert_never

from echo_hub.config.sections import HubConfig
from echo_hub.core.coordinator import Coordinator
from echo_hub.core.effects import (
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
from echo_hub.core.events import LearnerReady, StepDone, VersionPublished, VersionUnusable
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.core.spread.holdings import Arrival, Release
from echo_hub.dashboard.books_away import books_away
from echo_hub.dashboard.headers import add_security_headers
from echo_hub.dashboard.source import Changes
from echo_hub.distribution.publishing import Publishing, export_path
from echo_hub.evaluation.by_nodes import NodeEvaluations
from echo_hub.evaluation.due import Evaluations
from echo_hub.evaluation.evaluator import Evaluator, evaluator_of
from echo_hub.evaluation.measuring import Measuring
from echo_hub.intake.connected import ConnectedNodes, Welcoming, remember
from echo_hub.intake.doors import Doors
from echo_hub.intake.episodes import TrainingBatches, load_scoring_jobs
from echo_hub.intake.handing_out import HandingOut
from echo_hub.intake.known_names import KnownNames
from echo_hub.intake.receipts import ReceiptLookUps, ReceiptsOut, TrainedReceipts
from echo_hub.intake.totals import TotalsNews
from echo_hub.learner.schedule import share_of_highest
from echo_hub.lifecycle.retention import Retention
from echo_hub.lifecycle.sibling_runs import SiblingRuns
from echo_hub.net.broadcaster import Broadcaster
from echo_hub.net.distributor import Distributor
from echo_hub.net.joining import install_command, join_command, windows_install_command
from echo_hub.net.server import Server
from echo_hub.oversight.operator_access import guard_of
from echo_hub.oversight.operator_desk import Desk
from echo_hub.run.directory import RunDirectory
from echo_hub.scoring.preparing import GroupPreparation
from echo_hub.scoring.scorer import Scorer
from echo_hub.scoring.stop_strings import StopStrings
from echo_hub.serving.checking import Checking
from echo_hub.serving.driver import Driver
from echo_hub.serving.ending import RunEnding
from echo_hub.serving.housekeeping import Housekeeping
from echo_hub.serving.http_routes import http_routes
from echo_hub.serving.operating import Operation
from echo_hub.serving.resources import Resources
from echo_hub.sinks.chosen import chosen_sinks
from echo_hub.store.known_nodes import read_counted_names
from echo_hub.store.reading import read_evaluated
from echo_hub.training.own_sampler import OwnSampler
from echo_hub.training.trainer import LearnerEvent, LearnerState, Trainer
from echo_hub.views.evaluations import EvaluationViews
from echo_hub.views.pages_source import HubPages
from echo_hub.views.run import Moment, RunViews
from echo_hub.views.versions import VersionViews
from echo_shared.books import Evaluation


class Hub:
    """One hub, made by `echo_hub.serving.opening` in its event loop. Call `open` to open its port, then `serve`.
    `ending.finished` is set when the run is over."""

    def __init__(self, config: HubConfig, directory: RunDirectory, opened: Resources) -> None:
        self.config = config
        self.directory = directory
        self.key = opened.me.public_key
        self.run_id = opened.run_id
        self.server = Server(config.server)
        self.ending = RunEnding(last_version=config.training.steps, evaluated=opened.evaluated)
        self.partials = opened.partials
        self._opened = opened
        self._changes = Changes()
        # In this order: each is given what it needs of those before it.
        self._driver = Driver(
            coordinator=opened.coordinator,
            store=opened.store,
            clock=time.time,
            noted=self._changes.notify,
            arrived=StopStrings.of_run(config, opened.codec).arrived,
            is_behind=lambda: self._scorer.is_behind,
        )
        self.doors = Doors.of(config, opened.me, run_id=opened.run_id, limits=self.server.limits)
        self._connections = self.doors.connections
        self._distributor = self._make_distributor()
        self.publishing = Publishing(
            distributor=self._distributor,
            directory=directory,
            report=self._version_published,
            room=opened.store.room,
        )
        self._own_sampler = OwnSampler(config.training, report=self._driver.report)
        self._receipts = ReceiptsOut(send=self._connections.send)
        self._look_ups = ReceiptLookUps(store=opened.store, send=self._connections.send, flush=self._receipts.flush)
        self._trained_receipts = TrainedReceipts(tell=self._receipts.tell)
        self._checking = Checking.of(config, directory, opened, send=self._connections.send, report=self._driver.report)
        self.nodes = self._make_nodes()
        self._preparation = GroupPreparation(opened.problems)
        self._scorer = Scorer(pool=opened.scoring, bounds=opened.bounds, load=partial(load_scoring_jobs, opened.store))
        self._batches = TrainingBatches(opened.store, opened.problems)
        self._trainer = self._make_trainer()
        self._handing_out = self._make_handing_out()
        self._node_evaluations = self._make_node_evaluations()
        self._evaluator = self._make_evaluator()
        self._evaluations = self._make_evaluations()
        self._housekeeping = self._make_housekeeping()
        self._retention = Retention(self.config.keeping.steps, store=opened.store, status=opened.coordinator.status)
        self._totals = TotalsNews(store=opened.store, nodes=self.nodes.live, send=self._connections.send)
        self._sinks = chosen_sinks(
            config,
            directory.root,
            self.run_id,
            opened.store,
            self._changes,
            codec=opened.codec,
            problems=opened.problems,
        )
        self._siblings = SiblingRuns(
            directory, opened.store, run_id=self.run_id, hub_key=self.key, changed=self._changes.notify
        )
        self.pages = self._make_pages()
        self.operation = self._make_operation()
        self.guard = guard_of(config, directory, run_id=opened.run_id)
        self._desk = self._make_desk()

    def _make_distributor(self) -> Distributor:
        return Distributor(
            settings=self.config.dissemination,
            publisher=self._opened.publisher,
            broadcaster=Broadcaster(self._connections),
            connections=self._connections,
            record=self._record_distribution,
            stands_by=lambda node_id: self.nodes.stands_by(node_id),
        )

    def _make_nodes(self) -> ConnectedNodes:
        opened, config = self._opened, self.config
        return ConnectedNodes(
            report=self._driver.report,
            check_name=KnownNames(partial(opened.store.read, read_counted_names)).check,
            remember=partial(remember, opened.store),
            distributor=self._distributor,
            look_up=self._look_ups.answer,
            partials=opened.partials,
            checks=self._checking.by_nodes,
            invitations=opened.invitations,
            electricity_per_kwh=config.cost.electricity_per_kwh,
            welcome=Welcoming(
                run_id=opened.run_id,
                run_name=config.run.name,
                heartbeat_s=config.server.heartbeat_s,
                tracker=opened.tracker,
                distributor=self._distributor,
                published_version=lambda: opened.coordinator.published_version,
            ),
        )

    def _make_trainer(self) -> Trainer:
        return Trainer(
            settings=self._opened.learner,
            run_dir=self.directory.root,
            batches=self._batches,
            export_path=lambda step: export_path(self.config, self.directory, self._opened.coordinator.settings, step),
            learning_rate=self._learning_rate,
            objective=lambda step: self._opened.coordinator.settings.objective_of(step),
            disk=partial(self._opened.store.room.elsewhere, "the learner"),
            spawned=self._opened.spawned,
        )

    def _learning_rate(self, step: int) -> float:
        highest = self._opened.coordinator.settings.learning_rate_of(step)
        before = self._opened.start.steps_before if self._opened.start else 0
        return highest * share_of_highest(self.config.training, step, steps_before=before)

    def _make_handing_out(self) -> HandingOut:
        return HandingOut(
            self.config.sampling,
            stop_ids=self._stop_ids,
            store=self._opened.store,
            problems=self._opened.problems,
            nodes=self.nodes.live,
            offers=self._distributor,
            send=self._connections.send,
            sample=self._trainer.sample,
        )

    def _make_node_evaluations(self) -> NodeEvaluations:
        return NodeEvaluations(
            sets={chosen: self._opened.problems.rewards_of(chosen) for chosen in self._opened.problems.sets},
            report=self._driver.report,
            publish=self.publishing.keep_for_evaluation,
            load=lambda version: self._opened.store.read(read_evaluated, version),
            num_received=lambda: self._driver.num_received,
            is_alone=lambda: not self.nodes.live,
            run_is_over=lambda: self.ending.last_is_published,
        )

    def _make_evaluator(self) -> Evaluator | None:
        if self.config.evaluation.by != "ray":
            return None
        return evaluator_of(self._opened.learner, logs=self.directory.root / "logs", cluster=self._opened.cluster)

    def _make_evaluations(self) -> Evaluations:
        measure = Measuring(
            self.config,
            self.directory,
            stop_ids=self._stop_ids,
            problems=self._opened.problems,
            scoring=self._opened.scoring,
            sample=self._trainer.generate if self._evaluator is None else self._evaluator,
            by_nodes=self._node_evaluations,
        )
        return Evaluations(
            self.config,
            self.directory,
            done=self._opened.evaluated,
            first_version=self._first_version,
            measure=measure,
            record=self._record_evaluations,
        )

    def _make_housekeeping(self) -> Housekeeping:
        return Housekeeping(
            self.config.learner,
            store=self._opened.store,
            directory=self.directory,
            status=self._opened.coordinator.status,
            nodes=self.nodes.live,
            evaluating=self._evaluations.waiting,
            bar=self._distributor.bar,
            invite=self._opened.invitations.renew,
            know=self.nodes.note_useful,
        )

    def _make_pages(self) -> HubPages:
        store = self._opened.store.store
        return HubPages(
            changes=self._changes,
            store=store,
            run=RunViews(
                self.config,
                run_id=self.run_id,
                started_at=self._opened.started_at,
                first_version=self._first_version,
                lineage=self._opened.start.lineage if self._opened.start else (),
                store=store,
                versions=VersionViews(store, self.directory),
                evaluations=EvaluationViews(store, [one.name for one in self.config.evaluation_sets if one.name]),
                siblings=lambda: self._siblings.views,
            ),
            nodes=self.nodes.live,
            moment=self._moment,
        )

    def _make_operation(self) -> Operation:
        return Operation(
            self.config,
            self.directory,
            run_id=self.run_id,
            driver=self._driver,
            store=self._opened.store,
            moment=self._moment,
            view=self.pages.run_view,
            finished=self.ending.finished,
            url=lambda: self.url,
            notify=self._changes.notify,
        )

    def _make_desk(self) -> Desk:
        return Desk(
            self._opened.store,
            self.directory,
            guard=self.guard,
            report=self._driver.report,
            evaluate=self._evaluations.want,
            rotate_run_key=self._distributor.rotate_key,
            changed=self._changes.notify,
        )

    @property
    def coordinator(self) -> Coordinator:
        return self._opened.coordinator

    @property
    def _first_version(self) -> int:
        return self._opened.start.policy_version if self._opened.start else 0

    @property
    def _stop_ids(self) -> tuple[int, ...]:
        return tuple(sorted(self._opened.bounds.stop_ids))

    def _moment(self) -> Moment:
        return Moment(
            status=self._opened.coordinator.status(),
            distribution=self._distributor.status(),
            num_received=self._driver.num_received,
            rollouts_gone_on=self._opened.partials.num_gone_on,
            tokens_saved=self._opened.partials.tokens_saved,
            learner_is_starting=self._trainer.state is LearnerState.STARTING,
            learner_is_down=self._trainer.state is LearnerState.DOWN,
            last_is_published=self.ending.last_is_published,
            finished=self.ending.finished.is_set(),
            sinks=tuple(sink.problem for sink in self._sinks if sink.problem is not None),
            join_command=self.join_command,
            install_command=install_command(self.config, self.server),
            windows_install_command=windows_install_command(self.config, self.server),
            address=self.server.shared_url,
            turned_away=self.doors.turned_away(self._opened.tracker.refused),
            judges_away=self._opened.scoring.judges.absent,
            scoring_away=self._opened.scoring.absence,
            verifier_away=self._checking.verifying.absence,
            evaluator_away="" if self._evaluator is None else self._evaluator.absence,
            judged=self._opened.scoring.judges.counts,
            needs_nodes=self.config.run.mode != "colocated",
            watched=self.operation.watching.active,
            lacks_room=self._opened.store.room.lacks,
            lacks_database=self._opened.store.server.lacks,
        )

    async def open(self) -> None:
        """Opens the port. Raises ConfigError when it cannot be had, or the gateways' broker."""
        await self.doors.fleet.open()
        routes = http_routes(
            self.config,
            self._opened,
            doors=self.doors,
            nodes=self.nodes,
            introduce=self._distributor.introduce,
            pages=self.pages,
            guard=self.guard,
            desk=self._desk,
        )
        await self.server.open(routes, guards=[books_away, self.guard.middleware], dress=add_security_headers)

    async def serve(self) -> None:
        """Works until cancelled. Raises what makes going on impossible: a disk that fails, a learner that cannot live.

        A disk that is full is waited for, and so is a database server that is away.
        """
        report = self._driver.report
        self.operation.began()
        try:
            async with asyncio.TaskGroup() as tasks:
                for work in (
                    self._driver.run(self._act),
                    self.doors.fleet.run(self.nodes, self._driver.settled),
                    self._preparation.run(report),
                    self._handing_out.run(),
                    self._scorer.run(report),
                    self._checking.verifying.run(),
                    self._checking.by_nodes.run(),
                    self._trainer.run(self._learner_said),
                    self.publishing.run(),
                    self._distributor.run(),
                    self._evaluations.run(),
                    self._receipts.run(),
                    self._look_ups.run(),
                    self._trained_receipts.run(),
                    self._housekeeping.run(),
                    self._retention.run(),
                    self._housekeeping.watch_bans(),
                    self._housekeeping.watch_pardons(report),
                    self._desk.run(),
                    self._totals.run(),
                    self._siblings.run(self.server.shared_url),
                    self.operation.run(),
                    *(sink.run() for sink in self._sinks),
                ):
                    tasks.create_task(work)
                if self.config.run.mode == "colocated":
                    await self._own_sampler.join(self._opened.coordinator.published_version)
        except Exception as error:
            self.operation.failed(error)
            raise
        finally:
            self._opened.store.give_up()
            self._receipts.flush_all()
            await self._connections.close(*self.ending.farewell())
            await self.operation.ended()

    def _act(self, action: Action) -> None:
        match action:
            case PrepareGroup():
                self._preparation.submit(action.group_id)
            case SendLease():
                is_own = action.node_id == HUB_NODE_ID
                self._handing_out.submit(action, () if is_own else self._opened.partials.begin(action))
            case RevokeLease():
                self._opened.partials.revoked(action.lease_id)
                self._handing_out.submit(action)
            case SendReceipts():
                if receipts := self._connections.untold(action.node_id, action.receipts):
                    self._receipts.tell(action.node_id, receipts)
            case SendTrained():
                self._trained_receipts.submit(action)
            case LookUpReceipt():
                self._look_ups.submit(action)
            case ScoreRollout():
                self._scorer.submit(action.rollout_id, action.first_turn)
            case CheckRollout():
                self._checking.verifying.submit(action.rollout_id, is_urgent=action.is_urgent)
            case MeasureNumerics():
                self._checking.verifying.measure(action.rounding, action.policy_version)
            case HastenChecks():
                self._checking.verifying.hasten()
            case SendCheck():
                self._checking.by_nodes.submit(action)
            case HandOver():
                turns = action.first_turns
                at_hand = None if turns is None else self._batches.at_hand(action.group_id, turns)
                self._trainer.hand_over(action.group_id, action.rollout_ids, at_hand)
            case BeginStep():
                self._trainer.begin(action.step, action.batch)
            case TrainStep():
                self._trainer.train(action.step)
            case PublishVersion():
                self.publishing.submit(action.policy_version)
                self._checking.verifying.published()
            case AnnounceVersion():
                self._opened.partials.announced(action.policy_version)
                self._distributor.announce(action.policy_version)
            case EvaluationDone():
                self._node_evaluations.done(action.policy_version)
            case TellStandby():
                told = self.nodes.told(action.node_id, action.reason, action.detail)
                self._connections.send(action.node_id, told)
            case TellOperator():
                self._desk.settled(action.number)
            case FinishRun():
                self.ending.published()
            case _:
                assert_never(action)
        self._changes.notify()

    async def _learner_said(self, event: LearnerEvent) -> None:
        """Reports what the learner did; the version that it holds or has trained can be evaluated from now on."""
        await self._driver.report(event)
        self._changes.notify()
        if isinstance(event, LearnerReady):
            self._evaluations.reached(event.policy_version)
        elif isinstance(event, StepDone):
            self._evaluations.reached(event.step)

    async def _version_published(self, event: VersionPublished | VersionUnusable) -> None:
        await self._driver.report(event)
        if isinstance(event, VersionPublished) and self.config.run.mode == "colocated":
            await self._own_sampler.holds(event.policy_version)

    async def _record_distribution(self, news: Sequence[Release | Arrival]) -> None:
        store = self._opened.store
        await store.on_writer(store.store.record_distribution, news, time.time())
        self._changes.notify()

    async def _record_evaluations(self, measured: Sequence[Evaluation]) -> None:
        store = self._opened.store
        await store.on_writer(store.store.record_evaluations, measured)
        self.ending.evaluated(measured[0].policy_version)
        await self._desk.evaluated(measured[0].policy_version)
        self._changes.notify()

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def dashboard_url(self) -> str:
        """What the operator opens first: it logs in where no password is set."""
        credentials = self.guard.credentials
        return f"{self.url}/" if credentials.has_password else f"{self.url}/?token={credentials.token}"

    @property
    def join_command(self) -> str:
        return join_command(self.config, self.server)
