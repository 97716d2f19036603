"""Scripted stand-ins for the parts of a hub that its pages read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_hub.config.sections import HubConfig, RunConfig
from echo_hub.config.serving_sections import ServerConfig
from echo_hub.config.training_sections import TrainingConfig
from echo_hub.core.accounting.effects import FinishRun, PublishVersion, SendLease, TrainStep
from echo_hub.core.accounting.events import LearnerReady
from echo_hub.dashboard.source import Changes
from echo_hub.intake.connected import ConnectedNodes
from echo_hub.intake.early_stops import EarlyStops
from echo_hub.intake.partials import Partials
from echo_hub.net.gateway import NodeInfo
from echo_hub.net.invitations import Invitations
from echo_hub.net.live_nodes import LiveNodes
from echo_hub.operation.log_lines import EventLog
from echo_hub.run.directory import RunDirectory
from echo_hub.scoring.asked import AskedGroups, GroupBounds
from echo_hub.scoring.checks import SamplingBounds
from echo_hub.spread.holdings import DistributionStatus
from echo_hub.verify.scores_by_nodes import NodeScores
from echo_hub.views.evaluations import EvaluationViews
from echo_hub.views.pages_source import HubPages
from echo_hub.views.run import Moment, RunViews
from echo_hub.views.versions import VersionViews
from echo_shared.records.run import Evaluation, EvaluationKind
from echo_shared.wire.messages import (
    ArtefactOffer,
    CheckResult,
    Fetched,
    FinishReason,
    Have,
    KeyframeWanted,
    Links,
    NodeStatus,
    Rollout,
    Welcome,
    rollout_id,
)

STARTED = 900.0


def evaluated(version: int, accuracy: float, *, at: float = 1.0) -> list[Evaluation]:
    """Return a greedy evaluation with this accuracy, and a sampled one with half of it."""
    greedy = Evaluation(
        policy_version=version,
        kind=EvaluationKind.GREEDY,
        num_problems=4,
        samples=1,
        num_unscored=0,
        accuracy=accuracy,
        accuracy_error=0.125,
        pass_at={},
        mean_reward=0.5,
        mean_tokens=3.0,
        share_truncated=0.25,
        seconds=2.0,
        evaluated_at=at,
    )
    sampled = replace(greedy, kind=EvaluationKind.SAMPLED, samples=8, accuracy=accuracy / 2, pass_at={8: 1.0})
    return [greedy, sampled]


class Hub:
    """The parts of a hub that its pages read. Nodes' messages pass through real parts into a real store."""

    def __init__(self, driven: Any, directory: RunDirectory, **run: Any) -> None:
        self.driven = driven
        self.directory = directory
        self.said: dict[str, Any] = {}
        """Values that replace those of a running hub."""
        self.live = LiveNodes()
        asked = AskedGroups()
        bounds = GroupBounds(SamplingBounds(vocabulary_size=9, max_tokens=9, stop_ids=frozenset()), asked)
        partials = Partials(bounds)
        self.nodes = ConnectedNodes(
            queue=driven.queue,
            live=self.live,
            register=self,
            welcoming=self,
            distributor=self,
            look_ups=self,
            checks=self,
            scores=NodeScores(pairs=self, connections=self, temperature=1.0),
            relay=self,
            invitations=Invitations(),
            bounds=bounds,
            partials=partials,
            early_stops=EarlyStops(partials, bounds, asked),
        )
        self.config = HubConfig(
            run=RunConfig(**{"name": "spring", **run}),
            training=TrainingConfig(steps=2, groups_per_step=2, group_size=2, max_staleness=3),
            server=ServerConfig(port=1),
        )
        self.changes = Changes()
        self.event_log = EventLog(driven.driver)
        store = driven.store
        self.pages = HubPages(
            changes=self.changes,
            store=store,
            run=RunViews(
                self.config,
                run_id="r",
                started_at=STARTED,
                store=store,
                versions=VersionViews(store, directory),
                evaluations=EvaluationViews(store),
            ),
            nodes=self.live,
            moments=self,
        )

    def now(self) -> Moment:
        driver = self.driven.driver
        mid_run = Moment(
            status=driver.coordinator.status(),
            distribution=DistributionStatus(),
            num_received=self.driven.progress.num_received,
            rollouts_gone_on=0,
            tokens_saved=0,
            learner_is_starting=False,
            learner_is_down=False,
            learner_evaluates=False,
            last_is_published=False,
            finished=False,
            join_command="echo-node join http://hub",
        )
        return replace(mid_run, **self.said)

    async def check_name(self, node: NodeInfo) -> None:
        """Accept every node's name."""

    async def remember(self, node: NodeInfo) -> None:
        await self.driven.async_store.on_writer(
            self.driven.async_store.store.node_seen,
            node_id=node.node_id,
            public_key=node.public_key,
            name=node.name,
            backend=node.backend,
            device=node.device,
            now=STARTED,
        )

    async def answered(self, node_id: str, result: CheckResult) -> None:
        """Ignore checks of other nodes' rollouts."""

    def left(self, node_id: str) -> None:
        """Ignore nodes that leave."""

    async def answer(self, node_id: str, rollout_ids: Sequence[str]) -> None:
        """Do nothing: no node asks for receipts here."""

    def admit(self, node_id: str) -> None:
        """Admit every node."""

    def node_joined(self, node: NodeInfo) -> None:
        """Do nothing, as the two functions below do: versions are not distributed here."""

    def node_left(self, node_id: str) -> None: ...

    async def node_said(self, node_id: str, message: Fetched | Have | Links | KeyframeWanted) -> None: ...

    def welcome(self, node: NodeInfo) -> Welcome:
        return Welcome(
            run_id="r",
            run_name="spring",
            node_id=node.node_id,
            base=ArtefactOffer(manifest=b"", signature=bytes(64), torrent=b"", web_seed_path="/x"),
            policy=None,
            policy_version=0,
            tracker_path="/x",
            heartbeat_s=1.0,
            run_keys=(),
        )

    async def join(self, node_id: str, *, capacity: int = 100, cost_per_hour: float = 0.0) -> None:
        info = NodeInfo(
            node_id=node_id,
            public_key=bytes(32),
            name=f"{node_id}'s laptop",
            backend="torch",
            device="cpu",
            host="127.0.0.1",
            hub_host="127.0.0.1",
            swarm_port=0,
            mesh_port=0,
            cost_per_hour=cost_per_hour,
        )
        await self.nodes.node_joined(info)
        status = NodeStatus(activity="sampling", capacity=capacity, policy_version=0, tokens_per_s=12.5)
        await self.nodes.node_said(node_id, status)

    async def deliver(self, lease: SendLease) -> None:
        for index in lease.indices:
            rollout = Rollout(
                rollout_id=rollout_id(lease.lease_id, index),
                lease_id=lease.lease_id,
                group_id=lease.group_id,
                index=index,
                policy_version_start=lease.policy_version,
                policy_version_end=lease.policy_version,
                completion_ids=np.array([5, 7, 1], np.int32),
                behavior_logprobs=np.array([-0.5, -1.0, -0.25], np.float32),
                finish_reason=FinishReason.STOP,
                sampling_s=0.1,
            )
            await self.nodes.node_said(lease.node_id, rollout)

    async def train_to_the_end(self) -> None:
        """Train all steps, with every lease delivered; adapters are written where the learner would write them."""
        driven = self.driven
        driven.answered |= {TrainStep, PublishVersion}
        for version in (1, 2):
            self.directory.adapter(version).mkdir(parents=True)
            (self.directory.adapter(version) / "adapter_model.safetensors").write_bytes(bytes(1_000 * version))
        await driven.queue.put(LearnerReady(policy_version=0))
        await driven.work(lambda: bool(driven.of(FinishRun)), self.deliver)


@pytest.fixture
def make_evaluations() -> Callable[..., list[Evaluation]]:
    return evaluated


MakeHub = Callable[..., Awaitable[Hub]]


@pytest.fixture
def make_hub(drive: Callable[..., Awaitable[Any]], tmp_path: Path) -> MakeHub:
    async def make(mode: str = "async", **settings: Any) -> Hub:
        return Hub(await drive(mode=mode, **settings), RunDirectory(tmp_path), mode=mode)

    return make


@pytest.fixture
async def hub(make_hub: MakeHub) -> Hub:
    return await make_hub(max_staleness=3)
