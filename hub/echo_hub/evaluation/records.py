"""Records of evaluations, in the store."""

from __future__ import annotations

import time
from collections.abc import Sequence

from echo_hub.core.accounting.effects import ActionSettled
from echo_hub.dashboard.source import Changes
from echo_hub.driving.progress import RunProgress
from echo_hub.evaluation.due import DueVersions
from echo_hub.store.actions import settle_action
from echo_hub.store.async_store import AsyncStore
from echo_shared.records.run import Evaluation


class EvaluationRecords:
    """Commits evaluations, and reports the operator's actions that asked for them as done."""

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
