"""One hub: its parts, opened in order, and the tasks that carry news between them.

Data's way: gateway → fleet → driver (coordinator, store) → actions → gateway, scorer, trainer, distributor; what these
find out goes back to the driver as events. Nothing else talks to the coordinator.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiohttp import web

from echo_hub.config.sections import HubConfig
from echo_hub.core.coordinator import Coordinator
from echo_hub.core.effects import (
    Action,
    AnnounceVersion,
    EvaluationDone,
    FinishRun,
    LookUpReceipt,
    PrepareGroup,
    PublishVersion,
    RevokeLease,
    ScoreRollout,
    SendLease,
    SendReceipts,
    TrainStep,
)
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.core.events import (
    GroupPrepared,
    LearnerReady,
    NodeConnected,
    NodeReported,
    StepDone,
    VersionPublished,
)
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.core.spread.holdings import Arrival, Release
from echo_hub.dashboard.pages import routes as page_routes
from echo_hub.driver import Driver, StoreThread
from echo_hub.episodes import conversation, scoring_job, training_rollout
from echo_hub.evaluation.by_hub import Evaluations, HeldOut, evaluate, local, scored_by
from echo_hub.evaluation.by_nodes import GREEDY_TEMPERATURE, PATIENCE_DEADLINES, NodeEvaluations
from echo_hub.fleet import Fleet
from echo_hub.learner.settings import LearnerSettings, TrainingGroup
from echo_hub.live import LivePages
from echo_hub.net.artefact_routes import routes as artefact_routes
from echo_hub.net.broadcaster import Broadcaster
from echo_hub.net.distributor import Distributor
from echo_hub.net.gateway import Gateway, NodeInfo
from echo_hub.net.publisher import Publisher
from echo_hub.net.server import Server
from echo_hub.net.tracker import Tracker
from echo_hub.net.tracker import routes as tracker_routes
from echo_hub.run.directory import RunDirectory
from echo_hub.scoring.checks import SamplingBounds
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.scorer import Scorer, ScoringJob
from echo_hub.store.reading import AnsweredTurn
from echo_hub.store.reports import Evaluation
from echo_hub.tensorboard import EventFiles
from echo_hub.trainer import LearnerEvent, Trainer
from echo_shared.identity import Identity
from echo_shared.messages import (
    Lease,
    LeaseRevoked,
    Receipts,
    RefusalCode,
    Welcome,
)
from echo_shared.sampling import GroupRequest

log = logging.getLogger(__name__)

HOUSEKEEPING_S: Final = 15.0
BANS_S: Final = 1.0
"""How often the store is asked who is banned: the operator's command writes there."""
LOOK_UPS_WAITING: Final = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What `echo_hub.opening.open_hub` has opened, and closes again."""

    me: Identity
    run_id: str
    store: StoreThread
    publisher: Publisher
    tracker: Tracker
    problems: Problems
    scoring: ScoringPool
    bounds: SamplingBounds
    learner: LearnerSettings
    coordinator: Coordinator
    started_at: float
    """When the run was served for the first time."""
    evaluated: frozenset[int]
    """Versions whose accuracy is in the store."""


class Hub:
    """Made by `echo_hub.opening`. `serve` runs it; `finished` is set when the last version is out and evaluated."""

    def __init__(self, config: HubConfig, directory: RunDirectory, resources: Resources) -> None:
        self.config = config
        self.directory = directory
        self.key = resources.me.public_key
        self.run_id = resources.run_id
        self.finished = asyncio.Event()
        self.base_dir = resources.learner.base_dir
        self._store = resources.store
        self._tracker = resources.tracker
        self._problems = resources.problems
        self._scoring = resources.scoring
        self._bounds = resources.bounds
        self._last_is_out = False
        self._last_is_evaluated = config.training.steps in resources.evaluated
        self._to_prepare: asyncio.Queue[int] = asyncio.Queue()
        self._to_hand_out: asyncio.Queue[SendLease | RevokeLease] = asyncio.Queue()
        self._to_publish: asyncio.Queue[int] = asyncio.Queue()
        self._to_look_up: asyncio.Queue[LookUpReceipt] = asyncio.Queue(LOOK_UPS_WAITING)
        self._driver = Driver(coordinator=resources.coordinator, store=self._store, act=self._act, clock=time.time)
        self._scorer = Scorer(pool=self._scoring, bounds=self._bounds, load=self._load_payloads)
        self._trainer = Trainer(
            settings=resources.learner,
            run_dir=directory.root,
            load_batch=self._load_batch,
            export_path=self._export_path,
        )
        self._evaluations = Evaluations(
            config,
            directory,
            done=resources.evaluated,
            measure=self._measure,
            record=self._record_evaluations,
        )
        self._node_evaluations = NodeEvaluations(
            report=self._driver.report,
            publish=self._publish_to_evaluate,
            load=lambda version: self._store(self._store.store.load_evaluated, version),
            num_received=lambda: self._driver.num_received,
            is_alone=lambda: not self._fleet.nodes,
            run_is_over=lambda: self._last_is_out,
        )
        self._event_files = EventFiles(directory.root / "tensorboard", self._store.store)
        self._gateway = Gateway(me=resources.me, settings=config.server)
        self.distributor = Distributor(
            settings=config.dissemination,
            publisher=resources.publisher,
            broadcaster=Broadcaster(self._gateway),
            connections=self._gateway,
            record=self._record_distribution,
        )
        self._fleet = Fleet(
            report=self._driver.report,
            remember=self._remember,
            distributor=self.distributor,
            welcome=self._welcome,
            look_up=self._look_up,
        )
        self.pages = self._live_pages(resources)
        self.server = Server(config.server, self._routes(resources))

    def _live_pages(self, resources: Resources) -> LivePages:
        return LivePages(
            config=self.config,
            directory=self.directory,
            run_id=self.run_id,
            store=self._store.store,
            driver=self._driver,
            fleet=self._fleet,
            distribution=self.distributor.status,
            join_command=lambda: self.join_command,
            learner_pid=lambda: self._trainer.pid,
            finished=self.finished.is_set,
            started_at=resources.started_at,
        )

    def _routes(self, resources: Resources) -> Iterable[web.AbstractRouteDef]:
        yield from self._gateway.routes(self._fleet)
        yield from tracker_routes(
            self._tracker,
            trusted_proxies=self.config.server.trusted_proxies,
            introduce=self.distributor.introduce,
        )
        yield from artefact_routes(resources.publisher, self._tracker)
        yield from page_routes(self.pages)

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def join_command(self) -> str:
        token = " --token TOKEN" if self.config.server.join == "invite" else ""
        return f"echo-node join {self.url}{token}"

    async def serve(self) -> None:
        """Works until cancelled. Raises what makes going on impossible: a full disk, a learner that cannot live."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._start())
                tasks.create_task(self._driver.run())
                tasks.create_task(self._driver.tick())
                tasks.create_task(self._scorer.run(self._driver.report))
                tasks.create_task(self._trainer.run(self._learner_said))
                tasks.create_task(self._evaluations.run())
                tasks.create_task(self._event_files.run(self.pages.changes))
                tasks.create_task(self.distributor.run())
                tasks.create_task(self._prepare_groups())
                tasks.create_task(self._hand_out())
                tasks.create_task(self._publish_versions())
                tasks.create_task(self._look_up_receipts())
                tasks.create_task(self._watch_bans())
                tasks.create_task(self._keep_house())
        finally:
            code, what = RefusalCode.SHUTTING_DOWN, "The hub stops. Your node waits and connects again."
            if self.finished.is_set():
                code, what = RefusalCode.FINISHED, "The run is finished."
            await self._gateway.close(code, what)

    async def _start(self) -> None:
        """In co-located mode the learner is a sampler of its own."""
        if self.config.run.mode == "colocated":
            await self._driver.report(NodeConnected(node_id=HUB_NODE_ID))
            await self._offer_own_capacity(self._driver.coordinator.published_version)

    async def _offer_own_capacity(self, policy_version: int) -> None:
        capacity = self.config.training.groups_per_step * self.config.training.group_size
        await self._driver.report(NodeReported(node_id=HUB_NODE_ID, capacity=capacity, policy_version=policy_version))

    def _act(self, action: Action) -> None:
        match action:
            case PrepareGroup():
                self._to_prepare.put_nowait(action.group_id)
            case SendLease() | RevokeLease():
                self._to_hand_out.put_nowait(action)
            case SendReceipts():
                self._gateway.send(action.node_id, Receipts(receipts=action.receipts))
            case LookUpReceipt():
                if not self._to_look_up.full():  # Else the node asks again after its next connection.
                    self._to_look_up.put_nowait(action)
            case ScoreRollout():
                self._scorer.submit(action.rollout_id)
            case TrainStep():
                self._trainer.train(action.step)
            case PublishVersion():
                self._to_publish.put_nowait(action.policy_version)
            case AnnounceVersion():
                self.distributor.announce(action.policy_version)
            case EvaluationDone():
                self._node_evaluations.done(action.policy_version)
            case FinishRun():
                self._last_is_out = True
                self._finish_if_done()
        self.pages.changes.notify()

    def _finish_if_done(self) -> None:
        if self._last_is_out and self._last_is_evaluated:
            self.finished.set()

    async def _hand_out(self) -> None:
        """Leases and revocations, in order. What a later turn is asked with is read from the store."""
        while True:
            actions = [await self._to_hand_out.get()]
            while not self._to_hand_out.empty():
                actions.append(self._to_hand_out.get_nowait())
            leases = [action for action in actions if isinstance(action, SendLease)]
            episodes = {(lease.group_id, lease.indices[0]) for lease in leases if lease.turn}
            turns = await self._store(self._store.store.load_turns, episodes) if episodes else {}
            for action in actions:
                if isinstance(action, SendLease):
                    self._send_lease(action, turns.get((action.group_id, action.indices[0]), ())[: action.turn])
                else:
                    self._gateway.send(action.node_id, LeaseRevoked(lease_id=action.lease_id, reason=action.reason))

    def _send_lease(self, action: SendLease, turns: Sequence[AnsweredTurn]) -> None:
        """`turns`: those before, in order; gone when the group was dropped meanwhile, and the lease with it."""
        if len(turns) < action.turn:
            return
        prompt_ids = conversation(self._problems.prompt_ids(action.group_id), turns)
        sampling = self.config.sampling
        if action.node_id == HUB_NODE_ID:
            self._trainer.sample(
                GroupRequest(
                    lease_id=action.lease_id,
                    group_id=action.group_id,
                    indices=action.indices,
                    prompt_ids=prompt_ids,
                    seed=action.seed,
                    policy_version=action.policy_version,
                    temperature=sampling.temperature,
                    max_tokens=sampling.max_tokens,
                    stop_ids=tuple(self._bounds.stop_ids),
                )
            )
            return
        about, node = EvaluationGroup.of(action.group_id), self._fleet.nodes.get(action.node_id)
        if node is None or (about is not None and not self.distributor.has(action.policy_version)):
            return  # The node has left, or the evaluation has ended: who still wants the lease sees to its deadline.
        lease = Lease(
            lease_id=action.lease_id,
            group_id=action.group_id,
            indices=action.indices,
            prompt_ids=prompt_ids,
            seed=action.seed,
            policy_version=action.policy_version,
            temperature=GREEDY_TEMPERATURE if about and about.greedy else sampling.temperature,
            max_tokens=sampling.max_tokens,
            stop_ids=tuple(self._bounds.stop_ids),
            deadline_s=action.deadline_s,
            offer=self.distributor.offer(action.policy_version, node.info) if about and about.policy_version else None,
        )
        self._gateway.send(action.node_id, lease)

    def _welcome(self, node: NodeInfo) -> Welcome:
        version, distributor = self._driver.coordinator.published_version, self.distributor
        return Welcome(
            run_id=self.run_id,
            run_name=self.config.run.name,
            node_id=node.node_id,
            base=distributor.offer(0, node),
            policy=None if version == 0 else distributor.offer(version, node),
            policy_version=version,
            tracker_path=f"/announce/{self._tracker.passkey(node.node_id)}",
            heartbeat_s=self.config.server.heartbeat_s,
            run_keys=distributor.run_keys(),
            mesh=distributor.mesh_for(node),
        )

    async def _prepare_groups(self) -> None:
        while True:
            group_id = await self._to_prepare.get()
            await asyncio.to_thread(self._problems.prompt_ids, group_id)  # Fills the cache: sampling may be slow.
            await self._driver.report(GroupPrepared(group_id=group_id, seed=self._problems.seed(group_id)))

    async def _publish_versions(self) -> None:
        while True:
            version = await self._to_publish.get()
            await self.distributor.publish(version, self.directory.adapter(version))
            await self._driver.report(VersionPublished(policy_version=version))
            if self.config.run.mode == "colocated":
                await self._offer_own_capacity(version)

    async def _keep_house(self) -> None:
        """Notes who is still there; forgets old adapters, and the tokens of steps that every kept checkpoint holds."""
        learner = self.config.learner
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            await self._store(self._store.store.nodes_still_here, list(self._fleet.nodes), time.time())
            await asyncio.to_thread(
                self.directory.forget_adapters,
                kept=learner.adapters_kept,
                published_version=self._driver.coordinator.published_version,
                evaluating=self._evaluations.waiting.copy(),
            )
            trained = self._driver.coordinator.status().trained_steps
            await self._store(
                self._store.store.prune, trained - learner.checkpoint_every * (learner.checkpoints_kept + 1)
            )

    async def _remember(self, node: NodeInfo) -> None:
        await self._store(
            self._store.store.node_seen,
            node_id=node.node_id,
            public_key=node.public_key,
            name=node.name,
            backend=node.backend,
            device=node.device,
            now=time.time(),
        )
        log.info("node %s (%s, %s) joined", node.name, node.node_id, node.backend)

    async def _record_distribution(self, news: Sequence[Release | Arrival]) -> None:
        await self._store(self._store.store.record_distribution, news, time.time())
        self.pages.changes.notify()

    async def _watch_bans(self) -> None:
        while True:
            self.distributor.bar(await self._store(self._store.store.banned_nodes))
            await asyncio.sleep(BANS_S)

    async def _load_payloads(self, rollout_ids: Sequence[str]) -> Sequence[ScoringJob]:
        return [scoring_job(row) for row in await self._store(self._store.store.load_payloads, rollout_ids)]

    async def _load_batch(self, step: int) -> Sequence[TrainingGroup]:
        groups = await self._store(self._store.store.load_batch, step)
        return [
            TrainingGroup(
                prompt_ids=self._problems.prompt_ids(group.group_id),
                rollouts=tuple(training_rollout(episode) for episode in group.episodes),
            )
            for group in groups
        ]

    def _export_path(self, step: int) -> Path | None:
        training = self.config.training
        due = step % training.publish_every == 0 or step == training.steps
        return self.directory.adapter(step) if due or self._evaluations.is_due(step) else None

    async def _learner_said(self, event: LearnerEvent) -> None:
        """What it holds or has trained can be evaluated from now on."""
        await self._driver.report(event)
        if isinstance(event, LearnerReady):
            self._evaluations.reached(event.policy_version)
        elif isinstance(event, StepDone):
            self._evaluations.reached(event.step)

    async def _measure(self, policy_version: int) -> Sequence[Evaluation]:
        if self.config.evaluation.by == "nodes":
            patience_s = PATIENCE_DEADLINES * self.config.leases.deadline_s
            measured = await self._node_evaluations.measure(policy_version, patience_s=patience_s)
            if measured is not None:
                return measured
        stop_ids = tuple(self._bounds.stop_ids)
        heldout = await asyncio.to_thread(HeldOut.of_run, self.config, self._problems, stop_ids=stop_ids)
        generate = local(self._trainer.generate, self.directory)
        return await evaluate(policy_version, heldout, generate=generate, judge=scored_by(self._scoring))

    async def _publish_to_evaluate(self, policy_version: int) -> None:
        if policy_version:
            await self.distributor.lend(policy_version, self.directory.adapter(policy_version))

    async def _record_evaluations(self, measured: Sequence[Evaluation]) -> None:
        await self._store(self._store.store.record_evaluations, measured)
        self._last_is_evaluated |= measured[0].policy_version == self.config.training.steps
        self._finish_if_done()
        self.pages.changes.notify()

    async def _look_up_receipts(self) -> None:
        while True:
            asked = await self._to_look_up.get()
            await self._look_up(asked.node_id, (asked.rollout_id,))

    async def _look_up(self, node_id: str, rollout_ids: Sequence[str]) -> None:
        receipts = await self._store(self._store.store.receipts, node_id, rollout_ids)
        self._gateway.send(node_id, Receipts(receipts=tuple(receipts)))
