"""What the pages show, read from the store and from what the hub knows of this moment."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from echo_hub.config.sections import HubConfig
from echo_hub.connected import LiveNode
from echo_hub.core.spread.holdings import DistributionStatus, Progress, quantile
from echo_hub.core.status import CoordinatorStatus
from echo_hub.dashboard.api import STEPS_PER_ANSWER
from echo_hub.dashboard.model import (
    Accounting,
    Changes,
    DisseminationView,
    EvaluationView,
    LeaderboardRow,
    NodeView,
    NotableEvent,
    RunState,
    RunView,
    StepView,
    VersionView,
)
from echo_hub.driver import Driver
from echo_hub.run.directory import RunDirectory
from echo_hub.store.reports import Evaluation, EvaluationKind, NodeTotals, StepRecord, VersionRecord
from echo_hub.store.store import Store
from echo_hub.store.tallies import Source, Transport
from echo_hub.trainer import LearnerState
from echo_shared import step_figures

EVENTS_KEPT: Final = 50
MOST_CHARACTERS: Final = 500
VERSIONS_SHOWN: Final = 30
EVALUATIONS_SHOWN: Final = 120
RATE_WINDOW_S: Final = 30.0
LEARNER_IS_DOWN: Final = "The learner process has died; it is being started again."


class NotableLog(logging.Handler):
    """Keeps the newest log lines of the hub for the operator's page."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.events: deque[NotableEvent] = deque(maxlen=EVENTS_KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()[:MOST_CHARACTERS]
        except (TypeError, ValueError):
            self.handleError(record)
        else:
            warning = record.levelno >= logging.WARNING
            self.events.appendleft(NotableEvent(at=record.created, text=text, warning=warning))


class LivePages:
    """The hub's `PagesSource`. Counts come from the store; names, backends and activities are what nodes say."""

    def __init__(
        self,
        *,
        config: HubConfig,
        changes: Changes,
        directory: RunDirectory,
        run_id: str,
        store: Store,
        driver: Driver,
        nodes: Mapping[str, LiveNode],
        distribution: Callable[[], DistributionStatus],
        join_command: Callable[[], str],
        learner_state: Callable[[], LearnerState],
        finished: Callable[[], bool],
        started_at: float,
    ) -> None:
        self.changes = changes
        self.notable = NotableLog()
        self._config = config
        self._run_id = run_id
        self._store = store
        self._driver = driver
        self._live_nodes = nodes
        self._distribution = distribution
        self._join_command = join_command
        self._learner_state = learner_state
        self._finished = finished
        self._started_at = started_at
        self._received: deque[tuple[float, int]] = deque([(time.time(), 0)])
        self._evaluations: dict[tuple[int, EvaluationKind], Evaluation] = {}
        self._size_bytes = lru_cache(1_024)(lambda version: _size_bytes(directory.adapter(version)))

    async def run_view(self) -> RunView:
        status = self._driver.coordinator.status()
        return await asyncio.to_thread(self._run_view, status, self._distribution(), self._rollouts_per_s())

    async def nodes(self) -> tuple[NodeView, ...]:
        status = self._driver.coordinator.status()
        totals = await asyncio.to_thread(self._store.leaderboard)
        return tuple(self._node_view(row, status) for row in totals)

    async def steps(self, since: int) -> tuple[StepView, ...]:
        history = await asyncio.to_thread(self._store.steps_history, since, STEPS_PER_ANSWER)
        return tuple(_step_view(row) for row in history)

    async def leaderboard(self) -> tuple[LeaderboardRow, ...]:
        totals = await asyncio.to_thread(self._store.leaderboard)
        return tuple(
            LeaderboardRow(
                rank=rank,
                node_id=row.node_id,
                name=row.name,
                trained_rollouts=row.trained_rollouts,
                trained_tokens=row.trained_tokens,
                evaluated_rollouts=row.evaluated_rollouts,
                share=row.share,
                last_seen=time.time() if row.node_id in self._live_nodes else row.last_seen,
            )
            for rank, row in enumerate((row for row in totals if row.share > 0), start=1)
        )

    def _run_view(self, status: CoordinatorStatus, distribution: DistributionStatus, rollouts_per_s: float) -> RunView:
        config = self._config
        books = self._store.accounting()
        newest = self._store.newest_step()  # The coordinator may be ahead: its newest step may not be committed yet.
        step = _step_view(newest) if newest else None
        versions = self._store.versions_history(VERSIONS_SHOWN)
        evaluations = self._read_evaluations()
        return RunView(
            as_of=time.time(),
            run_id=self._run_id,
            name=config.run.name,
            mode=config.run.mode,
            task=config.task.name,
            base_model=config.model.base,
            join_command=self._join_command(),
            state=RunState.FINISHED if self._finished() else RunState.RUNNING,
            state_detail=self._detail(status),
            problems=(LEARNER_IS_DOWN,) if self._learner_state() is LearnerState.DOWN else (),
            starting=self._learner_state() is LearnerState.STARTING,
            started_at=self._started_at,
            finished_at=evaluations[-1].evaluated_at if self._finished() else None,
            steps_total=config.training.steps,
            trained_step=step.step if step else 0,
            published_version=status.published_version,
            group_size=config.training.group_size,
            max_staleness=config.training.max_staleness if config.run.mode == "async" else 0,
            mean_reward=step.mean_reward if step else None,
            staleness_mean=step.staleness_mean if step else None,
            staleness_max=step.staleness_max if step else None,
            newest_step=step,
            rollouts_per_s=rollouts_per_s,
            buffered_groups=status.groups_buffered,
            accounting=Accounting(
                leased=books.leased,
                trained=books.trained,
                evaluated=books.evaluated,
                dropped={reason.value: count for reason, count in books.by_drop_reason.items()},
                in_flight=books.in_flight,
            ),
            evaluations=_thinned(evaluations, EVALUATIONS_SHOWN),
            versions=tuple(self._version_view(row) for row in reversed(versions)),
            fetches_by_transport=_by_name(self._store.versions_by_transport()),
            dissemination=_dissemination_view(distribution.newest) if distribution.newest else None,
            newest_complete=distribution.newest_complete,
            nodes_on_newest=distribution.num_holding,
            nodes_connected=distribution.num_connected,
            uplink_bytes_s=distribution.uplink_bytes_s,
            events=tuple(self.notable.events),
        )

    def _read_evaluations(self) -> list[EvaluationView]:
        """All of them; only those since the last look are read from the store."""
        known = self._evaluations
        since = max((row.evaluated_at for row in known.values()), default=0.0)
        known = known | {(row.policy_version, row.kind): row for row in self._store.evaluations(since)}
        self._evaluations = known  # Replaced, never changed: another thread may be at it.
        greedy = sorted(version for version, kind in known if kind is EvaluationKind.GREEDY)
        return [_evaluation_view(known, version) for version in greedy]

    def _detail(self, status: CoordinatorStatus) -> str:
        if self._finished():
            return ""
        if self._learner_state() is LearnerState.STARTING:
            return "starting the learner"
        if status.finished:
            return "evaluating"
        if not status.nodes_connected:
            return "waiting for nodes"
        return "training" if status.training_step is not None else "collecting rollouts"

    def _rollouts_per_s(self) -> float:
        now, received = time.time(), self._driver.num_received
        self._received.append((now, received))
        while len(self._received) > 2 and self._received[0][0] < now - RATE_WINDOW_S:
            self._received.popleft()
        since, before = self._received[0]
        return (received - before) / (now - since) if now > since else 0.0

    def _node_view(self, row: NodeTotals, status: CoordinatorStatus) -> NodeView:
        live = self._live_nodes.get(row.node_id)
        return NodeView(
            node_id=row.node_id,
            name=row.name,
            backend=row.backend,
            device=row.device,
            connected=live is not None,
            banned=row.banned_at is not None,
            activity=live.activity if live else "",
            policy_version=live.policy_version if live else None,
            capacity=live.capacity if live else 0,
            in_flight=status.leased_by_node.get(row.node_id, 0),
            tokens_per_s=live.tokens_per_s if live else 0.0,
            received=row.received,
            trained=row.trained_rollouts,
            evaluated=row.evaluated_rollouts,
            dropped=row.dropped,
            last_seen=time.time() if live else row.last_seen,
        )

    def _version_view(self, row: VersionRecord) -> VersionView:
        return VersionView(
            policy_version=row.policy_version,
            published_at=row.published_at,
            size_bytes=self._size_bytes(row.policy_version),
            payload_bytes=row.payload_bytes,
            carrier=row.carrier,
            way=row.way,
            dissemination_p50_s=quantile(row.broadcast_seconds, 0.5),
            dissemination_p95_s=quantile(row.broadcast_seconds, 0.95),
            dissemination_max_s=quantile(row.broadcast_seconds, 1.0),
            fetches_by_transport=_by_name(row.fetches_by_transport),
            bytes_by_transport=_by_name(row.bytes_by_source),
        )


def _dissemination_view(progress: Progress) -> DisseminationView:
    release = progress.release
    return DisseminationView(
        policy_version=release.policy_version,
        carrier=release.carrier,
        way=release.way.value if release.way else "shared_memory",
        size_bytes=release.adapter_bytes,
        payload_bytes=release.payload_bytes,
        since_s=progress.since_s,
        num_told=progress.num_told,
        num_reached=len(progress.seconds),
        share_arrived=progress.share_arrived,
    )


def _evaluation_view(rows: Mapping[tuple[int, EvaluationKind], Evaluation], version: int) -> EvaluationView:
    greedy, sampled = rows[version, EvaluationKind.GREEDY], rows.get((version, EvaluationKind.SAMPLED))
    return EvaluationView(
        policy_version=version,
        accuracy=greedy.accuracy,
        accuracy_error=greedy.accuracy_error,
        num_problems=greedy.num_problems,
        mean_reward=greedy.mean_reward,
        mean_tokens=greedy.mean_tokens,
        share_truncated=greedy.share_truncated,
        samples=sampled.samples if sampled else 0,
        mean_at_k=sampled.accuracy if sampled else None,
        mean_at_k_error=sampled.accuracy_error if sampled else None,
        pass_at=sampled.pass_at if sampled else {},
        seconds=greedy.seconds + (sampled.seconds if sampled else 0.0),
        evaluated_at=greedy.evaluated_at,
    )


def _thinned(views: Sequence[EvaluationView], most: int) -> tuple[EvaluationView, ...]:
    """At most `most` of them, evenly, always with the first and the newest."""
    every = -(-len(views) // (most - 1)) if len(views) > most else 1
    return tuple(view for place, view in enumerate(views) if place % every == 0 or place == len(views) - 1)


def _step_view(row: StepRecord) -> StepView:
    known = step_figures.with_derived(row.metrics, lasted_s=row.trained_at - row.planned_at)
    return StepView(
        step=row.step,
        trained_at=row.trained_at,
        num_rollouts=row.num_rollouts,
        num_tokens=row.num_tokens,
        mean_reward=row.mean_reward,
        staleness_mean=row.staleness_mean,
        staleness_max=row.staleness_max,
        figures={figure.key: known.get(figure.key) for figure in step_figures.STEP_FIGURES},
    )


def _size_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*") if path.is_file())


def _by_name(counts: Mapping[Transport, int] | Mapping[Source, int]) -> dict[str, int]:
    return {str(name): count for name, count in counts.items()}
