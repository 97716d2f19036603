"""One hub: its parts, opened in order, and the tasks that carry news between them.

Data's way: gateway → fleet → driver (coordinator, store) → actions → gateway, scorer, trainer, publisher; what these
find out goes back to the driver as events. Nothing else talks to the coordinator.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.config import HubConfig
from echo_hub.core.coordinator import Coordinator
from echo_hub.core.effects import (
    Action,
    AnnounceVersion,
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
from echo_hub.core.events import GroupPrepared, NodeConnected, NodeReported, VersionPublished
from echo_hub.core.settings import HUB_NODE_ID
from echo_hub.dashboard.pages import routes as page_routes
from echo_hub.driver import Driver, StoreThread
from echo_hub.fleet import Fleet
from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_hub.live import LivePages
from echo_hub.net.artefact_routes import routes as artefact_routes
from echo_hub.net.gateway import Gateway, NodeInfo
from echo_hub.net.publisher import Publisher
from echo_hub.net.server import Server
from echo_hub.net.tracker import Tracker
from echo_hub.net.tracker import routes as tracker_routes
from echo_hub.run_directory import RunDirectory
from echo_hub.trainer import Trainer
from echo_hub.verify.checks import SamplingBounds
from echo_hub.verify.problems import Problems, accuracy
from echo_hub.verify.scorer import Scorer, ScoringJob
from echo_shared.identity import Identity
from echo_shared.messages import (
    ArtefactOffer,
    Fetched,
    Lease,
    LeaseRevoked,
    Peers,
    PolicyPublished,
    Receipts,
    RefusalCode,
    Welcome,
)
from echo_shared.sampling import GroupRequest

log = logging.getLogger(__name__)

HOUSEKEEPING_S: Final = 15.0
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
        self._publisher = resources.publisher
        self._tracker = resources.tracker
        self._problems = resources.problems
        self._bounds = resources.bounds
        self._already_evaluated = resources.evaluated
        self._to_prepare: asyncio.Queue[int] = asyncio.Queue()
        self._to_publish: asyncio.Queue[int] = asyncio.Queue()
        self._to_look_up: asyncio.Queue[LookUpReceipt] = asyncio.Queue(LOOK_UPS_WAITING)
        self._driver = Driver(coordinator=resources.coordinator, store=self._store, act=self._act, clock=time.time)
        self._scorer = Scorer(problems=self._problems, bounds=self._bounds, load=self._load_payloads)
        self._trainer = Trainer(
            settings=resources.learner,
            run_dir=directory.root,
            load_batch=self._load_batch,
            export_path=self._export_path,
            heldout_prompts=self._problems.heldout_prompts,
            evaluated=self._evaluated,
        )
        self._fleet = Fleet(
            report=self._driver.report,
            remember=self._remember,
            fetched=self._fetched,
            welcome=self._welcome,
            look_up=self._look_up,
        )
        self._gateway = Gateway(me=resources.me, settings=config.server, inbox=self._fleet)
        self.pages = LivePages(
            config=config,
            directory=directory,
            run_id=self.run_id,
            store=self._store.store,
            driver=self._driver,
            fleet=self._fleet,
            join_command=lambda: self.join_command,
            learner_pid=lambda: self._trainer.pid,
            finished=self.finished.is_set,
            started_at=resources.started_at,
        )
        self.server = Server(
            config.server,
            [
                *self._gateway.routes(),
                *tracker_routes(
                    self._tracker, trusted_proxies=config.server.trusted_proxies, introduce=self._introduce
                ),
                *artefact_routes(self._publisher),
                *page_routes(self.pages),
            ],
        )

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
                tasks.create_task(self._trainer.run(self._driver.report))
                tasks.create_task(self._prepare_groups())
                tasks.create_task(self._publish_versions())
                tasks.create_task(self._look_up_receipts())
                tasks.create_task(self._keep_house())
        finally:
            await self._gateway.close(RefusalCode.SHUTTING_DOWN, "The hub stops. Your node waits and connects again.")

    async def _start(self) -> None:
        """The base's accuracy first, if nobody measured it yet; and the learner as a sampler of its own."""
        if 0 not in self._already_evaluated:
            self._trainer.evaluate(0)
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
            case SendLease():
                self._send_lease(action)
            case RevokeLease():
                self._gateway.send(action.node_id, LeaseRevoked(lease_id=action.lease_id, reason=action.reason))
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
                self._announce(action.policy_version)
            case FinishRun():
                self._finish()
        self.pages.changes.notify()

    def _finish(self) -> None:
        if self.config.training.steps in self._already_evaluated:
            self.finished.set()
        else:
            self._trainer.evaluate(self.config.training.steps)

    def _send_lease(self, action: SendLease) -> None:
        prompt_ids = self._problems.prompt_ids(action.group_id)
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
        lease = Lease(
            lease_id=action.lease_id,
            group_id=action.group_id,
            indices=action.indices,
            prompt_ids=prompt_ids,
            seed=action.seed,
            policy_version=action.policy_version,
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            stop_ids=tuple(self._bounds.stop_ids),
            deadline_s=action.deadline_s,
        )
        self._gateway.send(action.node_id, lease)

    def _announce(self, policy_version: int) -> None:
        for node_id, live in self._fleet.nodes.items():
            offer = self._offer(policy_version, live.info)
            self._gateway.send(node_id, PolicyPublished(policy_version=policy_version, offer=offer))

    def _introduce(self, info_hash: bytes, peer: tuple[str, int], node_ids: tuple[str, ...]) -> None:
        for node_id in node_ids:
            self._gateway.send(node_id, Peers(info_hash=info_hash, peers=(peer,)))

    def _offer(self, policy_version: int, node: NodeInfo) -> ArtefactOffer:
        return self._publisher.offer_for(policy_version, node_ip=node.host, hub_host=node.hub_host)

    def _welcome(self, node: NodeInfo) -> Welcome:
        version = self._driver.coordinator.published_version
        return Welcome(
            run_id=self.run_id,
            run_name=self.config.run.name,
            node_id=node.node_id,
            base=self._offer(0, node),
            policy=None if version == 0 else self._offer(version, node),
            policy_version=version,
            tracker_path=f"/announce/{self._tracker.passkey(node.node_id)}",
            heartbeat_s=self.config.server.heartbeat_s,
        )

    async def _prepare_groups(self) -> None:
        while True:
            group_id = await self._to_prepare.get()
            await asyncio.to_thread(self._problems.prompt_ids, group_id)  # Fills the cache: sampling may be slow.
            await self._driver.report(GroupPrepared(group_id=group_id, seed=self._problems.seed(group_id)))

    async def _publish_versions(self) -> None:
        while True:
            version = await self._to_publish.get()
            await self._publisher.publish_policy(version, self.directory.adapter(version))
            await self._driver.report(VersionPublished(policy_version=version))
            if self.config.run.mode == "colocated":
                await self._offer_own_capacity(version)

    async def _keep_house(self) -> None:
        """Notes who is still there; forgets old adapters, and the tokens of steps that every kept checkpoint holds."""
        training = self.config.training
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            await self._store(self._store.store.nodes_still_here, list(self._fleet.nodes), time.time())
            await asyncio.to_thread(
                self.directory.forget_adapters,
                kept=training.adapters_kept,
                published_version=self._driver.coordinator.published_version,
            )
            trained = self._driver.coordinator.status().trained_steps
            await self._store(
                self._store.store.prune, trained - training.checkpoint_every * (training.checkpoints_kept + 1)
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

    async def _fetched(self, node_id: str, message: Fetched) -> None:
        if not self._publisher.knows(message.info_hash, message.policy_version):
            log.debug("node %s says that it fetched what is not published", node_id)
            return
        await self._store(self._store.store.record_fetch, node_id=node_id, fetch=message, now=time.time())
        self.pages.changes.notify()

    async def _load_payloads(self, rollout_ids: Sequence[str]) -> Sequence[ScoringJob]:
        rows = await self._store(self._store.store.load_payloads, rollout_ids)
        return [ScoringJob(rollout_id=row.rollout_id, group_id=row.group_id, payload=row.payload) for row in rows]

    async def _load_batch(self, step: int) -> Sequence[TrainingGroup]:
        groups = await self._store(self._store.store.load_batch, step)
        return [
            TrainingGroup(
                prompt_ids=self._problems.prompt_ids(group.group_id),
                rollouts=tuple(
                    TrainingRollout(
                        completion_ids=rollout.completion_ids,
                        behavior_logprobs=rollout.behavior_logprobs,
                        reward=rollout.reward,
                    )
                    for rollout in group.rollouts
                ),
            )
            for group in groups
        ]

    def _export_path(self, step: int) -> Path | None:
        training = self.config.training
        due = step % training.publish_every == 0 or step == training.steps
        return self.directory.adapter(step) if due else None

    async def _evaluated(self, policy_version: int, completions: Sequence[NDArray[np.int32]]) -> None:
        rewards = await asyncio.to_thread(self._problems.heldout_rewards, completions)
        solved = accuracy(rewards)
        await self._store(
            self._store.store.record_evaluation,
            policy_version=policy_version,
            accuracy=solved,
            num_problems=len(rewards),
            now=time.time(),
        )
        log.info("version %d solves %.1f %% of the held-out problems", policy_version, 100 * solved)
        if policy_version == self.config.training.steps:
            self.finished.set()
        self.pages.changes.notify()

    async def _look_up_receipts(self) -> None:
        while True:
            asked = await self._to_look_up.get()
            await self._look_up(asked.node_id, (asked.rollout_id,))

    async def _look_up(self, node_id: str, rollout_ids: Sequence[str]) -> None:
        receipts = await self._store(self._store.store.receipts, node_id, rollout_ids)
        self._gateway.send(node_id, Receipts(receipts=tuple(receipts)))
