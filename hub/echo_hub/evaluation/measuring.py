"""Evaluate the due versions and record the figures.

With evaluation.by = "nodes", nodes sample the completions. Otherwise, or if nodes do not finish, the hub's own sampler
draws them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from echo_hub.config.sections import HubConfig
from echo_hub.core.accounting.effects import ActionSettled
from echo_hub.dashboard.source import Changes
from echo_hub.driving.progress import RunProgress
from echo_hub.evaluation.by_hub import HeldOut, VersionSampler, drawn_by, evaluate_sets
from echo_hub.evaluation.by_nodes import PATIENCE_DEADLINES, NodeEvaluations
from echo_hub.evaluation.by_sessions import judged_by
from echo_hub.evaluation.due import DueVersions
from echo_hub.run.directory import RunDirectory
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.sessions.host import SessionHost
from echo_hub.store.actions import settle_action
from echo_hub.store.async_store import AsyncStore
from echo_shared.records.run import Evaluation

log = logging.getLogger(__name__)


class Measuring:
    """Evaluates versions. `own` is the hub's own sampler: the learner, or a process in the Ray cluster."""

    def __init__(
        self,
        config: HubConfig,
        directory: RunDirectory,
        *,
        stop_ids: tuple[int, ...],
        problems: Problems,
        scoring: ScoringPool,
        sessions: SessionHost | None,
        own: VersionSampler,
        by_nodes: NodeEvaluations,
    ) -> None:
        self._config = config
        self._directory = directory
        self._stop_ids = stop_ids
        self._problems = problems
        self._scoring = scoring
        self._sessions = sessions
        self._own = own
        self._by_nodes = by_nodes

    async def measure(self, policy_version: int) -> Sequence[Evaluation]:
        """Return the figures of every set and kind. Raises ScorerError if no completion could be scored."""
        if self._sessions is not None:
            await self._sessions.problems_known()
        if self._config.evaluation.by == "nodes":
            patience_s = PATIENCE_DEADLINES * self._config.leases.deadline_s
            measured = await self._by_nodes.measure(policy_version, patience_s=patience_s)
            if measured is not None:
                return measured
        sets = await asyncio.to_thread(HeldOut.of_run, self._config, self._problems, stop_ids=self._stop_ids)
        adapter = self._directory.adapter(policy_version) if policy_version else None
        generate = drawn_by(self._own, adapter)
        losses = self._config.sessions.losses
        judge = judged_by(self._scoring, self._sessions, self._problems, losses=losses)
        return await evaluate_sets(policy_version, sets, generate=generate, judge=judge)


class EvaluationRecords:
    """Commits evaluations to the store. If an operator's action requested the evaluation, also reports this action as
    done."""

    def __init__(self, store: AsyncStore, *, progress: RunProgress, due: DueVersions, changes: Changes) -> None:
        self._store = store
        self._progress = progress
        self._due = due
        self._changes = changes

    async def record(self, measured: Sequence[Evaluation]) -> None:
        """Commit all figures of one version, report the waiting actions as done, and notify the pages."""
        version = measured[0].policy_version
        await self._store.on_writer(self._store.store.record_evaluations, measured)
        self._progress.evaluated(version)
        for number in self._due.take_actions(version):
            settled = ActionSettled(number=number, done=True, after=version)
            await self._store.write(settle_action, settled, time.time())
        self._changes.notify()


class Evaluations:
    """Evaluates the queued versions, one after the other."""

    def __init__(self, due: DueVersions, *, measuring: Measuring, books: EvaluationRecords) -> None:
        self._due = due
        self._measuring = measuring
        self._books = books

    async def run(self) -> None:
        """Evaluate queued versions until cancelled. An error that makes evaluation impossible is raised."""
        while True:
            version = await self._due.next()
            measured = await self._measuring.measure(version)
            await self._books.record(measured)
            self._due.done(version)
            extra = {"event": "version_evaluated", "subject": str(version)}
            solved = "; ".join(evaluation.text for evaluation in measured)
            log.info("version %d solves %s", version, solved, extra=extra)
