"""Check the run every few seconds; log and report each problem that begins or ends.

The observation comes from the same source as the pages, so page, event and alert agree.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from echo_hub.config.operation_sections import AlertsConfig
from echo_hub.operation.problems import Change, Limits, Observation, Problem, Problems
from echo_shared.books import StepRecord
from echo_shared.errors import StorageError

log = logging.getLogger(__name__)

LOOK_S: Final = 10.0


class Told(Protocol):
    """Receiver of changes: `echo_hub.operation.alerting.Alerts`."""

    def changed(self, change: Change) -> None: ...


def limits_of(settings: AlertsConfig) -> Limits:
    return Limits(**{name: getattr(settings, name) for name in Limits.__slots__})


def free_bytes(directory: Path) -> int | None:
    """Return the free bytes on the directory's disk; None if the system does not tell. Blocks."""
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None


class Watching:
    """Watches the run.

    `observe` returns the state of the run, even if the database cannot be read. `steps` returns the trained steps after
    a given step, in order; empty at the newest step. `notify` is called when the set of problems changes.
    """

    def __init__(
        self,
        settings: AlertsConfig,
        *,
        observe: Callable[[], Awaitable[Observation]],
        steps: Callable[[int], Awaitable[Sequence[StepRecord]]],
        told: Told,
        clock: Callable[[], float],
        notify: Callable[[], object] = lambda: None,
    ) -> None:
        self._problems = Problems(limits_of(settings))
        self._observe = observe
        self._steps = steps
        self._told = told
        self._clock = clock
        self._notify = notify

    @property
    def active(self) -> tuple[Problem, ...]:
        """Current problems."""
        return self._problems.active

    async def run(self) -> None:
        """Check the run until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Check the run once. If the database cannot be read, the steps are read next time."""
        try:
            await self._read_steps()
        except StorageError as error:
            log.debug("the newest steps could not be read: %s", error.brief)
        before = self.active
        for change in self._problems.observe(await self._observe(), self._clock()):
            _say(change)
            self._told.changed(change)
        if self.active != before:
            self._notify()

    async def _read_steps(self) -> None:
        trend = self._problems.rewards
        while records := await self._steps(trend.step):
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
