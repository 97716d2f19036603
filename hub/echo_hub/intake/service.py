"""The intake service: connects nodes, sends leases and receipts, and prepares and scores what it takes in."""

from __future__ import annotations

import asyncio
from typing import assert_never

from echo_hub.core.accounting.effects import (
    AnnounceVersion,
    CloseSession,
    DeliverAnswer,
    IntakeAction,
    LookUpReceipt,
    PrepareGroup,
    RevokeLease,
    ScoreRollout,
    SendCheck,
    SendLease,
    SendReceipts,
    SendTrained,
    TellStandby,
)
from echo_hub.core.accounting.events import SlotsChanged
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.distribution.service import DistributionService
from echo_hub.driving.shared import Shared
from echo_hub.intake.command_relay import CommandRelay
from echo_hub.intake.connected import ConnectedNodes, Welcoming
from echo_hub.intake.deliveries import Deliveries
from echo_hub.intake.early_stops import EarlyStops
from echo_hub.intake.episodes import DrawnRollouts, ScoringJobs
from echo_hub.intake.handing_out import HandingOut
from echo_hub.intake.known_nodes import KnownNodes
from echo_hub.intake.partials import Partials
from echo_hub.intake.receipts import ReceiptLookUps, ReceiptsOut, TrainedReceipts
from echo_hub.intake.totals import TotalsNews
from echo_hub.scoring.preparing import GroupPreparation
from echo_hub.scoring.scorer import Scorer
from echo_hub.scoring.session_scorer import SessionScorer
from echo_hub.sessions.host import SessionHost
from echo_hub.sessions.turns import SessionKey
from echo_hub.training.service import TrainingService
from echo_hub.verify.by_nodes import NodeChecks
from echo_hub.verify.scores_by_nodes import NodeScores
from echo_shared.wire.messages import RefusalCode


class IntakeService:
    """Owns the connected nodes, their leases, receipts and checks, the unfinished rollouts and the scorer."""

    def __init__(
        self,
        shared: Shared,
        partials: Partials,
        *,
        distribution: DistributionService,
        training: TrainingService,
    ) -> None:
        resources, connections = shared.resources, shared.connections
        config, store = resources.config, resources.store
        self.partials = partials
        bounds = resources.group_bounds
        self.drawn = DrawnRollouts(
            store, resources.problems, resources.asked, run_seed=config.run.seed, codec=resources.codec
        )
        self.deliveries = Deliveries()
        self._driver = shared.driver
        self._live = shared.live
        self._connections = connections
        self._receipts = ReceiptsOut(connections, distribution.distributor.nodes)
        self._look_ups = ReceiptLookUps(store=store, connections=connections, receipts=self._receipts)
        self._trained_receipts = TrainedReceipts(self._receipts)
        self._checks = NodeChecks(
            rollouts=self.drawn,
            connections=connections,
            queue=shared.queue,
            temperature=config.sampling.temperature,
        )
        self.scores = NodeScores(
            pairs=resources.coordinator.scorers, connections=connections, temperature=config.sampling.temperature
        )
        self.relay = CommandRelay(connections)
        self.nodes = ConnectedNodes(
            queue=shared.queue,
            live=shared.live,
            register=KnownNodes(store),
            welcoming=_welcoming_of(shared, distribution),
            distributor=distribution.distributor,
            look_ups=self._look_ups,
            checks=self._checks,
            scores=self.scores,
            relay=self.relay,
            partials=partials,
            bounds=bounds,
            early_stops=EarlyStops(partials, bounds, resources.asked),
            invitations=resources.invitations,
            electricity_per_kwh=config.cost.electricity_per_kwh,
        )
        self._preparation = GroupPreparation(resources.problems, shared.queue, resources.sessions)
        self._queue = shared.queue
        self._sessions = resources.sessions
        self._scorer = _scorer_of(shared)
        self._handing_out = _handing_out_of(shared, distribution, training)
        self._totals = TotalsNews(store=store, nodes=distribution.distributor.nodes, connections=connections)

    def handle(self, action: IntakeAction) -> None:
        match action:
            case PrepareGroup():
                self._preparation.submit(action.group_id)
            case SendLease():
                is_own = action.node_id == HUB_NODE_ID
                self._handing_out.submit(action, () if is_own else self.partials.begin(action))
            case RevokeLease():
                self.partials.revoked(action.lease_id)
                self._handing_out.submit(action)
            case SendReceipts():
                if receipts := self._connections.untold(action.node_id, action.receipts):
                    self._receipts.tell(action.node_id, receipts)
            case SendTrained():
                self._trained_receipts.submit(action)
            case LookUpReceipt():
                self._look_ups.submit(action)
            case ScoreRollout():
                self._scorer.submit(action.rollout_id, action.first_turn, attempt=action.attempt)
            case CloseSession():
                if self._sessions is not None:
                    self._sessions.close(SessionKey(action.group_id, action.index, action.attempt))
            case SendCheck():
                self._checks.submit(action)
            case AnnounceVersion():
                self.partials.announced(action.policy_version)
            case DeliverAnswer():
                self.deliveries.deliver(action)
            case TellStandby():
                told = self._live.told(action.node_id, action.reason, action.detail)
                self._connections.send(action.node_id, told)
            case _:
                assert_never(action)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for work in (
                self._connections.fleet.run(self.nodes, self._driver),
                self._preparation.run(),
                self._handing_out.run(),
                self._scorer.run(),
                self._checks.run(),
                self._receipts.run(),
                self._look_ups.run(),
                self._trained_receipts.run(),
                self._totals.run(),
            ):
                tasks.create_task(work)
            if self._sessions is not None:
                tasks.create_task(self._tell_slots(self._sessions))

    async def _tell_slots(self, sessions: SessionHost) -> None:
        """Tell the coordinator the number of sessions that may be open, now and at each change."""
        slots = sessions.slots
        while True:
            await self._queue.put(SlotsChanged(slots=slots))
            slots = await sessions.slots_changed(slots)

    async def close(self, code: RefusalCode, text: str) -> None:
        """Send the waiting receipts, and close all connections with this code and text."""
        self._receipts.flush_all()
        await self._connections.close(code, text)


def _welcoming_of(shared: Shared, distribution: DistributionService) -> Welcoming:
    resources = shared.resources
    config = resources.config
    return Welcoming(
        run_id=resources.run_id,
        run_name=config.run.name,
        heartbeat_s=config.server.heartbeat_s,
        tracker=resources.tracker,
        distributor=distribution.distributor,
        coordinator=resources.coordinator,
        punching=config.dissemination.punching,
    )


def _handing_out_of(shared: Shared, distribution: DistributionService, training: TrainingService) -> HandingOut:
    resources = shared.resources
    return HandingOut(
        resources.config.sampling,
        bounds=resources.bounds,
        store=resources.store,
        problems=resources.problems,
        asked=resources.asked,
        nodes=shared.live,
        offers=distribution.distributor,
        connections=shared.connections,
        own_device=training.trainer,
    )


def _scorer_of(shared: Shared) -> Scorer:
    resources = shared.resources
    sessions = None
    if resources.sessions:
        sessions = SessionScorer(resources.sessions, resources.problems, resources.scoring)
    return Scorer(
        pool=resources.scoring,
        bounds=resources.group_bounds,
        committed=ScoringJobs(resources.store),
        queue=shared.queue,
        backlog=shared.backlog,
        sessions=sessions,
    )
