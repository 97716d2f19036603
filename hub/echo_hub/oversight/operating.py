"""Operation of the hub: turn log lines into events, watch for problems, and send alerts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from echo_hub.config.operation_sections import AlertsConfig
from echo_hub.dashboard.model import RunView
from echo_hub.dashboard.source import Changes
from echo_hub.driving.driver import Driver
from echo_hub.driving.progress import RunProgress
from echo_hub.net.server import Server
from echo_hub.operation.alert import AboutRun
from echo_hub.operation.alerting import Alerts, webhook_of
from echo_hub.operation.log_lines import EventLog
from echo_hub.operation.problems import ProblemKind, RunObservation, RunProblems
from echo_hub.operation.watching import Watching, free_bytes
from echo_hub.run.directory import RunDirectory
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.events import read_events
from echo_hub.store.reports import read_steps
from echo_hub.views.alarms import alarms
from echo_hub.views.pages_source import HubPages
from echo_hub.views.run import MomentSource, broken_now, common_faults, goes_on_with, lacks_nodes, waits_for
from echo_shared.errors import EchoError, StorageError
from echo_shared.records.run import EventFilter, StepRecord
from echo_shared.wire.messages.fields import printable_line

log = logging.getLogger(__name__)

STEADY_STEPS: Final = 8
"""The learner's idle share is shown as a problem only after this many trained steps, because fewer steps say little
about it."""
STEPS_AT_ONCE: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The run's id, name and address, for alerts."""

    run_id: str
    name: str
    server: Server

    def about(self) -> AboutRun:
        return AboutRun(run_id=self.run_id, name=printable_line(self.name), url=self.server.url)


class RunObserver:
    """Observes the run for problems, from the same sources as the pages."""

    def __init__(
        self,
        directory: RunDirectory,
        *,
        store: AsyncStore,
        moments: MomentSource,
        pages: HubPages,
        changes: Changes,
    ) -> None:
        self._directory = directory
        self._store = store
        self._moments = moments
        self._pages = pages
        self._changes = changes

    async def observe(self) -> RunObservation:
        """Return the current state of the run. While the database cannot be read, figures from it are left out."""
        try:
            view = await self._pages.run_view()
        except StorageError:
            view = None
        moment = self._moments.now()
        faults = " ".join(common_faults(moment))
        broken = broken_now(moment) | goes_on_with(moment) | ({ProblemKind.COMMON_FAULT: faults} if faults else {})
        capacity = view.capacity if view is not None and view.trained_step >= STEADY_STEPS else None
        return RunObservation(
            broken=broken,
            is_over=moment.last_is_published,
            lacks_nodes=lacks_nodes(moment),
            nodes_connected=moment.status.nodes_connected,
            learner_waits=waits_for(moment) == "rollouts",
            idle_share=capacity.idle_by_reason.get("rollouts", 0.0) if capacity else None,
            idle_window_s=capacity.window_s if capacity else 0.0,
            disk_free_bytes=await asyncio.to_thread(free_bytes, self._directory.root),
            forged=" ".join(alarms(view.newest_step)) if view is not None else "",
            quarantined=moment.status.trust.quarantined,
            turned_away=sum(sum(counts.values()) for counts in moment.turned_away.values()),
        )

    async def steps(self, since: int) -> Sequence[StepRecord]:
        """Return the trained steps after step `since`, in order, at most `STEPS_AT_ONCE` of them."""
        return await asyncio.to_thread(self._store.store.read, read_steps, since, STEPS_AT_ONCE)

    def notify(self) -> None:
        self._changes.notify()


class Operation:
    """Event log, watching and alerts of a hub. Create it in the hub's event loop."""

    def __init__(
        self,
        settings: AlertsConfig,
        *,
        driver: Driver,
        store: AsyncStore,
        progress: RunProgress,
        observer: RunObserver,
        pages: HubPages,
        problems: RunProblems,
        description: Description,
    ) -> None:
        self.event_log = EventLog(driver)
        self._driver = driver
        self._store = store
        self._progress = progress
        self._pages = pages
        self._server = description.server
        self._end_is_told = False
        self._alerts = Alerts(settings, description, webhook=webhook_of(settings))
        self.watching = Watching(problems, run=observer, told=self._alerts)

    async def run(self) -> None:
        """Watch the run, send alerts and report the run's end, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for work in (self._alerts.run(), self.watching.run(), self._tell_of_the_end()):
                tasks.create_task(work)

    def began(self) -> None:
        log.info("the hub serves, at %s", self._server.url, extra={"event": "hub_started"})

    def failed(self, error: BaseException) -> None:
        """Log the error that ends the hub. The traceback of an EchoError is left out, because the error's text is
        written for users."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        known = error.brief if isinstance(error, EchoError) else ""
        traceback = None if known else error
        log.error("the hub ends: %s", known or repr(error), exc_info=traceback, extra={"event": "hub_failed"})

    async def ended(self) -> None:
        """Log that the hub stops, and commit the last events if the database can be written."""
        if self._progress.finished.is_set() and not self._end_is_told:
            with suppress(StorageError):
                await self._tell_of_the_end()
        log.info("the hub stops", extra={"event": "hub_stopped"})
        await asyncio.sleep(0)  # Let the driver receive this line's event.
        await self._driver.commit_noted()

    async def _tell_of_the_end(self) -> None:
        await self._progress.finished.wait()
        wanted = EventFilter(kind="run_finished")
        if not await self._store.read(read_events, wanted, 1):  # The hub may have logged the end before a restart.
            text = summary(await self._store.server.until_done(self._pages.run_view))
            log.info("%s", text, extra={"event": "run_finished"})
            self._alerts.finished(text, time.time())
        self._end_is_told = True


def summary(view: RunView) -> str:
    accuracy = ""
    if view.accuracy_before is not None and view.accuracy_after is not None:
        accuracy = f", held-out accuracy {view.accuracy_before:.1%} before and {view.accuracy_after:.1%} after"
    nodes = "1 node" if view.nodes_useful == 1 else f"{view.nodes_useful} nodes"
    rollouts = f"{view.accounting.trained} rollouts" + (f" of {nodes}" if view.mode != "colocated" else "")
    return f"The run is finished: {view.trained_step} steps, {rollouts}{accuracy}."
