from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from echo_hub import live as live_module
from echo_hub.config.sections import HubConfig, RunConfig, ServerConfig, TrainingConfig
from echo_hub.connected import ConnectedNodes
from echo_hub.core.effects import AnnounceVersion, FinishRun, PublishVersion, SendLease, TrainStep
from echo_hub.core.events import LearnerReady, StepDone
from echo_hub.core.spread.holdings import Arrival, DistributionStatus, Progress, Release
from echo_hub.dashboard.model import Accounting, Changes, DisseminationView, EvaluationView, Readiness, RunState
from echo_hub.dashboard.pages import routes
from echo_hub.live import LivePages
from echo_hub.net.gateway import NodeInfo
from echo_hub.run.directory import RunDirectory
from echo_hub.store.reports import Evaluation, EvaluationKind
from echo_hub.store.tallies import SOURCES, TRANSPORTS
from echo_hub.tensorboard import EventFiles
from echo_hub.trainer import LearnerState
from echo_shared import step_figures
from echo_shared.messages import (
    ArtefactOffer,
    Fetched,
    FinishReason,
    Have,
    KeyframeWanted,
    LeaseReturned,
    Links,
    NodeStatus,
    Rollout,
    Way,
    Welcome,
    rollout_id,
)
from echo_shared.step_figures import Chart, StepFigure

STARTED = 900.0


def evaluated(version: int, accuracy: float, *, at: float) -> list[Evaluation]:
    """Greedy and sampled, the latter half as good."""
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
    """The hub's parts around its pages: what nodes say goes by the connected nodes and the driver into the store."""

    def __init__(self, driven: Any, directory: RunDirectory, **run: Any) -> None:
        self.driven = driven
        self.directory = directory
        self.learner_state = LearnerState.RUNNING
        self.is_finished = False
        self.distribution = DistributionStatus()
        self.nodes = ConnectedNodes(
            report=driven.driver.report,
            remember=self._remember,
            distributor=self,
            welcome=self._welcome,
            look_up=self._look_up,
        )
        self.config = HubConfig(
            run=RunConfig(**{"name": "spring", **run}),
            training=TrainingConfig(steps=2, groups_per_step=2, group_size=2, max_staleness=3),
            server=ServerConfig(port=1),
        )
        self.pages = LivePages(
            config=self.config,
            changes=Changes(),
            directory=directory,
            run_id="r",
            store=driven.store,
            driver=driven.driver,
            nodes=self.nodes.live,
            distribution=lambda: self.distribution,
            join_command=lambda: "echo-node join http://hub",
            learner_state=lambda: self.learner_state,
            finished=lambda: self.is_finished,
            started_at=STARTED,
        )

    async def _remember(self, node: NodeInfo) -> None:
        await self.driven.async_store.node_seen(
            node_id=node.node_id,
            public_key=node.public_key,
            name=node.name,
            backend=node.backend,
            device=node.device,
            now=STARTED,
        )

    async def _look_up(self, node_id: str, rollout_ids: Sequence[str]) -> None:
        """Nobody asks for receipts here."""

    def admit(self, node_id: str) -> None:
        """Nobody is banned here."""

    def node_joined(self, node: NodeInfo) -> None:
        """Nothing is distributed here, as in the two below."""

    def node_left(self, node_id: str) -> None: ...

    async def node_said(self, node_id: str, message: Fetched | Have | Links | KeyframeWanted) -> None: ...

    def _welcome(self, node: NodeInfo) -> Welcome:
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

    async def join(self, node_id: str, *, capacity: int = 100) -> None:
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
        """The whole run, by all that is leased; adapters appear where the learner writes them."""
        driven = self.driven
        driven.answered |= {TrainStep, PublishVersion}
        for version in (1, 2):
            self.directory.adapter(version).mkdir(parents=True)
            (self.directory.adapter(version) / "adapter_model.safetensors").write_bytes(bytes(1_000 * version))
        await driven.driver.report(LearnerReady(policy_version=0))
        await driven.work(lambda: bool(driven.of(FinishRun)), self.deliver)


@pytest.fixture
async def hub(drive: Callable[..., Awaitable[Any]], tmp_path: Path) -> Hub:
    return Hub(await drive(max_staleness=3), RunDirectory(tmp_path))


async def test_a_run_before_its_first_step(hub: Hub) -> None:
    view = await hub.pages.run_view()
    assert (view.run_id, view.name, view.mode, view.task) == ("r", "spring", "async", "arithmetic")
    assert (view.state, view.state_detail, view.problems) == (RunState.RUNNING, "waiting for nodes", ())
    assert (view.started_at, view.finished_at, view.steps_total, view.trained_step) == (STARTED, None, 2, 0)
    assert (view.group_size, view.max_staleness, view.join_command) == (2, 3, "echo-node join http://hub")
    assert (view.mean_reward, view.staleness_mean, view.staleness_max) == (None, None, None)
    assert (view.accounting, view.evaluations, view.versions) == (Accounting(), (), ())
    assert view.fetches_by_transport == dict.fromkeys(TRANSPORTS, 0)
    assert (view.dissemination, view.nodes_on_newest, view.nodes_connected, view.uplink_bytes_s) == (None, 0, 0, None)
    assert await hub.pages.nodes() == await hub.pages.steps(0) == await hub.pages.leaderboard() == ()


async def test_work_under_way(hub: Hub) -> None:
    await hub.join("a", capacity=4)
    await hub.driven.until(lambda: sum(len(lease.indices) for lease in hub.driven.of(SendLease)) == 4)
    (node,) = await hub.pages.nodes()
    assert (node.node_id, node.name, node.connected, node.activity) == ("a", "a's laptop", True, "sampling")
    assert (node.capacity, node.in_flight, node.tokens_per_s, node.policy_version) == (4, 4, 12.5, 0)
    assert (node.received, node.trained, node.dropped) == (0, 0, 0)
    assert node.last_seen >= time.time() - 60
    view = await hub.pages.run_view()
    assert view.state_detail == "collecting rollouts"
    assert view.accounting == Accounting(leased=4, in_flight=4)
    lease = hub.driven.of(SendLease)[0]
    returned = LeaseReturned(lease_id=lease.lease_id, indices=lease.indices, reason="the owner plays")
    await hub.nodes.node_said("a", returned)
    await hub.nodes.node_left("a")
    await hub.join("b")
    await hub.driven.until(lambda: hub.driven.of(SendLease)[-1].node_id == "b")
    view = await hub.pages.run_view()
    assert view.accounting.dropped == {"returned": len(lease.indices)}
    assert view.accounting.balanced
    gone = next(node for node in await hub.pages.nodes() if node.node_id == "a")
    assert (gone.connected, gone.activity, gone.capacity, gone.last_seen) == (False, "", 0, STARTED)


async def test_a_whole_run(hub: Hub) -> None:
    await hub.join("a")
    await hub.train_to_the_end()
    for node_id, version, swarm_bytes, seconds in (
        ("a", 1, 900, 1.0),
        ("b", 1, 0, 3.0),
        ("a", 2, 2_000, 2.0),
        ("a", None, 0, 60.0),
    ):
        fetched = Fetched(
            info_hash=bytes([version or 0] * 20),
            policy_version=version,
            seconds=seconds,
            swarm_bytes=swarm_bytes,
            web_seed_bytes=100,
        )
        arrival = Arrival(node_id=node_id, fetched=fetched, broadcast_s=seconds)
        hub.driven.store.record_distribution([arrival], now=STARTED)
    release = Release(policy_version=2, adapter_bytes=2_000, payload_bytes=700, carrier="delta", way=Way.SWARM)
    hub.driven.store.record_distribution([release], now=STARTED)
    hub.driven.store.record_evaluations(evaluated(0, 0.25, at=1.0))
    hub.driven.store.record_evaluations(evaluated(2, 0.75, at=50.0))
    hub.is_finished = True

    view = await hub.pages.run_view()
    assert (view.state, view.state_detail, view.finished_at) == (RunState.FINISHED, "", 50.0)
    assert (view.trained_step, view.published_version) == (2, 2)
    assert (view.mean_reward, view.accounting.trained, view.accounting.in_flight) == (0.5, 8, 0)
    assert view.accounting.balanced
    assert view.evaluations[1] == EvaluationView(
        policy_version=2,
        accuracy=0.75,
        accuracy_error=0.125,
        num_problems=4,
        mean_reward=0.5,
        mean_tokens=3.0,
        share_truncated=0.25,
        samples=8,
        mean_at_k=0.375,
        mean_at_k_error=0.125,
        pass_at={8: 1.0},
        seconds=4.0,
        evaluated_at=50.0,
    )
    assert view.newest_step == (await hub.pages.steps(1))[0]
    assert (view.accuracy_before, view.accuracy_after) == (0.25, 0.75)
    newest, oldest = view.versions
    assert (newest.policy_version, newest.size_bytes, newest.dissemination_p50_s) == (2, 2_000, 2.0)
    assert (oldest.policy_version, oldest.size_bytes, oldest.dissemination_max_s) == (1, 1_000, 3.0)
    assert oldest.fetches_by_transport == {"swarm": 1, "web_seed": 1}
    assert (oldest.dissemination_p50_s, oldest.dissemination_p95_s, oldest.payload_bytes) == (1.0, 3.0, None)
    assert (newest.payload_bytes, newest.carrier, newest.way) == (700, "delta", "swarm")
    assert oldest.bytes_by_transport == dict.fromkeys(SOURCES, 0) | {"swarm": 900, "web_seed": 200}
    by_transport = dict.fromkeys(TRANSPORTS, 0) | {"swarm": 2, "web_seed": 1}
    assert view.fetches_by_transport == by_transport, "the base model is not counted"

    steps = await hub.pages.steps(0)
    assert [(step.step, step.num_rollouts, step.num_tokens) for step in steps] == [(1, 4, 12), (2, 4, 12)]
    shown = [[step.figures[name] for name in ("loss", "seconds", "grad_norm")] for step in steps]
    assert shown == [[0.5, 1.5, None]] * 2
    assert await hub.pages.steps(1) == steps[1:]
    (row,) = await hub.pages.leaderboard()
    assert (row.rank, row.node_id, row.trained_rollouts, row.trained_tokens, row.share) == (1, "a", 8, 24, 1.0)


async def test_a_step_is_shown_as_soon_as_it_is_committed_and_no_sooner(hub: Hub) -> None:
    driven = hub.driven
    driven.answered.add(PublishVersion)
    await hub.join("a")
    await driven.driver.report(LearnerReady(policy_version=0))
    await driven.work(lambda: bool(driven.of(TrainStep)), hub.deliver)
    await driven.driver.report(StepDone(step=1, metrics={"loss": 0.5}))
    await driven.work(lambda: len(driven.of(TrainStep)) == 2 and bool(driven.of(AnnounceVersion)), hub.deliver)
    may_commit = threading.Event()
    held = asyncio.ensure_future(driven.thread(may_commit.wait))
    await driven.driver.report(StepDone(step=2, metrics={"loss": 0.25}))
    for _ in range(10):
        await asyncio.sleep(0)
    assert driven.driver.coordinator.status().trained_steps == 2, "it is on its way into the store"
    view = await hub.pages.run_view()
    may_commit.set()
    assert view.newest_step is not None, "the figures of step 1 stay until those of step 2 are there"
    assert (view.trained_step, view.newest_step.step, view.newest_step.loss) == (1, 1, 0.5)
    assert (view.mean_reward, view.staleness_mean, view.staleness_max) == (0.5, 0.0, 0)
    assert await held
    await driven.until(lambda: bool(driven.of(FinishRun)))
    view = await hub.pages.run_view()
    assert view.newest_step is not None
    assert (view.trained_step, view.newest_step.step, view.newest_step.loss) == (2, 2, 0.25)


async def test_a_version_on_its_way(hub: Hub) -> None:
    release = Release(policy_version=3, adapter_bytes=900, payload_bytes=300, carrier="delta", way=Way.BROADCAST)
    progress = Progress(release=release, since_s=0.5, num_told=4, seconds=(0.25,), share_arrived=0.75)
    hub.distribution = DistributionStatus(
        newest=progress, num_holding=1, num_connected=5, uplink_bytes_s=2.5e6, newest_complete=2
    )
    view = await hub.pages.run_view()
    assert view.dissemination == DisseminationView(
        policy_version=3,
        carrier="delta",
        way="broadcast",
        size_bytes=900,
        payload_bytes=300,
        since_s=0.5,
        num_told=4,
        num_reached=1,
        share_arrived=0.75,
    )
    assert view.newest_complete == 2
    assert view.dissemination.under_way
    assert (view.nodes_on_newest, view.nodes_connected, view.uplink_bytes_s) == (1, 5, 2.5e6)


async def test_of_many_evaluations_some_between_are_left_out(hub: Hub) -> None:
    for version in range(3 * live_module.EVALUATIONS_SHOWN):
        hub.driven.store.record_evaluations(evaluated(version, 0.5, at=1.0 + version)[:1])
    shown = [view.policy_version for view in (await hub.pages.run_view()).evaluations]
    assert len(shown) <= live_module.EVALUATIONS_SHOWN
    assert (shown[0], shown[-1]) == (0, 3 * live_module.EVALUATIONS_SHOWN - 1)
    assert max(late - early for early, late in itertools.pairwise(shown)) <= 4


async def test_ranks_count_only_those_who_have_trained_rollouts(hub: Hub) -> None:
    await hub.join("idle", capacity=0)
    await hub.join("a", capacity=2)
    await hub.join("b", capacity=100)
    await hub.train_to_the_end()
    rows = await hub.pages.leaderboard()
    assert [row.rank for row in rows] == list(range(1, len(rows) + 1))
    assert "idle" not in {row.node_id for row in rows}
    assert sum(row.trained_rollouts for row in rows) == 8
    assert rows[0].trained_rollouts >= rows[-1].trained_rollouts
    assert {node.node_id for node in await hub.pages.nodes()} == {"idle", "a", "b"}


async def test_a_dead_learner_is_a_problem_and_one_that_starts_is_not(hub: Hub) -> None:
    view = await hub.pages.run_view()
    assert (view.problems, view.readiness) == ((), Readiness.READY)
    hub.learner_state = LearnerState.STARTING
    view = await hub.pages.run_view()
    assert (view.problems, view.state_detail, view.readiness) == ((), "starting the learner", Readiness.STARTING)
    hub.learner_state = LearnerState.DOWN
    view = await hub.pages.run_view()
    (problem,) = view.problems
    assert "learner" in problem and view.readiness is Readiness.FAILING


@pytest.mark.parametrize("mode", ["sequential", "colocated"])
async def test_only_async_runs_have_a_staleness_bound(
    drive: Callable[..., Awaitable[Any]], tmp_path: Path, mode: str
) -> None:
    hub = Hub(await drive(mode=mode), RunDirectory(tmp_path), mode=mode)
    view = await hub.pages.run_view()
    assert (view.mode, view.max_staleness) == (mode, 0)


async def test_the_rate_counts_what_was_received(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    await hub.join("a")
    await hub.train_to_the_end()
    assert (await hub.pages.run_view()).rollouts_per_s > 0
    monkeypatch.setattr(live_module, "RATE_WINDOW_S", 0.0)
    await hub.pages.run_view()
    assert (await hub.pages.run_view()).rollouts_per_s == 0, "nothing since the last look"


async def test_the_newest_log_lines_are_shown_first(hub: Hub) -> None:
    log = logging.getLogger("test.live")
    log.setLevel(logging.DEBUG)
    log.addHandler(hub.pages.notable)
    log.debug("not for the operator")
    for number in range(live_module.EVENTS_KEPT):
        log.info("node %d joined", number)
    log.warning("the learner died")
    log.removeHandler(hub.pages.notable)
    events = (await hub.pages.run_view()).events
    assert len(events) == live_module.EVENTS_KEPT
    assert [(event.text, event.warning) for event in events[:2]] == [
        ("the learner died", True),
        (f"node {live_module.EVENTS_KEPT - 1} joined", False),
    ]


async def test_a_figure_that_is_added_to_the_table_is_shown_everywhere(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the page with its chart and column, in JSON, at /metrics and in TensorBoard: no reader is told of it."""
    added = StepFigure(
        key="entropy",
        label="of the policy",
        about="Mean entropy.",
        unit="nats/token",
        prometheus="echo_learner_entropy",
        chart="entropy",
        column="Entropy",
    )
    monkeypatch.setattr(step_figures, "STEP_FIGURES", (*step_figures.STEP_FIGURES, added))
    chart = Chart(key="entropy", title="Entropy", about="Entropy by step")
    monkeypatch.setattr(step_figures, "CHARTS", (*step_figures.CHARTS, chart))
    await hub.join("a")
    await hub.train_to_the_end()

    application = web.Application()
    application.add_routes(routes(hub.pages))
    async with TestClient(TestServer(application)) as client:
        page = await (await client.get("/")).text()
        metrics = await (await client.get("/metrics")).text()
        (first, _) = (await (await client.get("/api/v1/steps")).json())["steps"]
        (point, _) = (await (await client.get("/api/v1/curves")).json())["points"]
        newest = (await (await client.get("/api/v1/run")).json())["newest_step"]
    assert 'id="chart-entropy"' in page and "&#34;entropy&#34;, &#34;of the policy&#34;" in page
    assert ">Entropy</th>" in page and ">1.2</td>" in page
    assert "\necho_learner_entropy 1.25\n" in metrics
    assert (first["entropy"], newest["entropy"], point["entropy"]) == (1.25, 1.25, 1.25)

    files = EventFiles(tmp_path / "tensorboard", hub.driven.store)
    writer = files.open()
    files.catch_up(writer)
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("train/entropy")] == [1.25, 1.25]
