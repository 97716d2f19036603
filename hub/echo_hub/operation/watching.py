"""Check the run every few seconds. Log and report each problem that begins or ends.

The check reads the same data as the pages. So page, event and alert agree.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from echo_hub.operation.alerting import Alerts
from echo_hub.operation.problems import Change, RunObservation, RunProblem, RunProblems
from echo_shared.errors import StorageError
from echo_shared.records.run import StepRecord

log = logging.getLogger(__name__)

LOOK_S: Final = 10.0


class WatchedRun(Protocol):
    """The run to watch. Implemented by `echo_hub.oversight.operating`."""

    async def observe(self) -> RunObservation:
        """Return the state of the run. Works even while the database cannot be read."""

    async def steps(self, since: int) -> Sequence[StepRecord]:
        """Return trained steps after step `since`, in order; empty if there are none yet. Raises StorageError."""

    def notify(self) -> None:
        """Report that the set of problems has changed, so that pages are updated."""


def free_bytes(directory: Path) -> int | None:
    """Return the free bytes on the directory's disk; None if the system does not tell. Blocks the calling thread."""
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None


class Watching:
    """Watches the run. `problems` holds the current problems; nothing else changes them."""

    def __init__(self, problems: RunProblems, *, run: WatchedRun, told: Alerts) -> None:
        self._problems = problems
        self._run = run
        self._told = told

    @property
    def active(self) -> tuple[RunProblem, ...]:
        return self._problems.active

    async def run(self) -> None:
        """Check the run every LOOK_S seconds, until cancelled."""
        while True:
            await self.look(time.time())
            await asyncio.sleep(LOOK_S)

    async def look(self, now: float) -> None:
        """Check the run once. Steps that cannot be read from the database now are read at the next check."""
        try:
            await self._read_steps()
        except StorageError as error:
            log.debug("the newest steps could not be read: %s", error.brief)
        before = self.active
        for change in self._problems.observe(await self._run.observe(), now):
            _say(change)
            self._told.changed(change)
        if self.active != before:
            self._run.notify()

    async def _read_steps(self) -> None:
        trend = self._problems.rewards
        while records := await self._run.steps(trend.step):
            for record in records:
                trend.add(record.step, record.mean_reward)


def _say(change: Change) -> None:
    problem = change.problem
    extra = {
        "event": "problem_began" if change.began else "problem_ended",
        "subject": problem.kind.value,
        "data": {"since": problem.since},
    }
    level, text = (logging.WARNING, "%s") if change.began else (logging.INFO, "over: %s")
    log.log(level, text, problem.text, extra=extra)
