"""What a hub says of itself, wired: its log lines become events, its problems are watched, and alerts go out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

from echo_hub.config.sections import HubConfig
from echo_hub.dashboard.model import RunView
from echo_hub.operation.alert import AboutRun
from echo_hub.operation.alerting import Alerts, webhook_of
from echo_hub.operation.event_log import EventLog
from echo_hub.operation.problems import Observation, ProblemKind
from echo_hub.operation.watching import Watching, free_bytes
from echo_hub.run.directory import RunDirectory
from echo_hub.serving.driver import Driver
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.events import read_events
from echo_hub.store.reports import read_steps
from echo_hub.views.alarms import alarms
from echo_hub.views.run import Moment, broken_now, common_faults, goes_on_with, lacks_nodes, waits_for
from echo_shared.books import EventFilter, StepRecord
from echo_shared.errors import EchoError, StorageError
from echo_shared.messages.fields import printable_line

log = logging.getLogger(__name__)

STEADY_STEPS: Final = 8
"""Before so many, how idle the learner was says little."""
STEPS_AT_ONCE: Final = 1_000


class Operation:
    """Made in the hub's event loop. `moment` and `view` are what the pages show; `finished` is set when the run is
    over; `url` is the hub's address, once it has one."""

    def __init__(
        self,
        config: HubConfig,
        directory: RunDirectory,
        *,
        run_id: str,
        driver: Driver,
        store: AsyncStore,
        moment: Callable[[], Moment],
        view: Callable[[], Awaitable[RunView]],
        finished: asyncio.Event,
        url: Callable[[], str],
        notify: Callable[[], object],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.event_log = EventLog(lambda event: loop.call_soon_threadsafe(driver.note, event))
        self._config = config
        self._directory = directory
        self._driver = driver
        self._store = store
        self._moment = moment
        self._view = view
        self._finished = finished
        self._url = url
        self._end_is_told = False
        name = printable_line(config.run.name)
        self._alerts = Alerts(
            config.alerts, lambda: AboutRun(run_id=run_id, name=name, url=url()), webhook=webhook_of(config.alerts)
        )
        self.watching = Watching(
            config.alerts, observe=self._observe, steps=self._steps, told=self._alerts, clock=time.time, notify=notify
        )

    async def run(self) -> None:
        """Works for ever."""
        async with asyncio.TaskGroup() as tasks:
            for work in (self._alerts.run(), self.watching.run(), self._tell_of_the_end()):
                tasks.create_task(work)

    def began(self) -> None:
        """The hub serves from now on."""
        log.info("the hub serves, at %s", self._url(), extra={"event": "hub_started"})

    def failed(self, error: BaseException) -> None:
        """It ends by an error. Where that has a text for people, that says all."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        known = error.brief if isinstance(error, EchoError) else ""
        traceback = None if known else error
        log.error("the hub ends: %s", known or repr(error), exc_info=traceback, extra={"event": "hub_failed"})

    async def ended(self) -> None:
        """It serves no more. Returns once what was said last is in the store, if that takes it."""
        if self._finished.is_set() and not self._end_is_told:
            with suppress(StorageError):
                await self._tell_of_the_end()
        log.info("the hub stops", extra={"event": "hub_stopped"})
        await asyncio.sleep(0)  # The line is on its way to the driver.
        await self._driver.commit_noted()

    async def _tell_of_the_end(self) -> None:
        await self._finished.wait()
        wanted = EventFilter(kind="run_finished")
        if not await self._store.read(read_events, wanted, 1):  # Nor was it told before a restart.
            text = summary(await self._store.server.until_done(self._view))
            log.info("%s", text, extra={"event": "run_finished"})
            self._alerts.finished(text, time.time())
        self._end_is_told = True

    async def _steps(self, since: int) -> Sequence[StepRecord]:
        return await asyncio.to_thread(self._store.store.read, read_steps, since, STEPS_AT_ONCE)

    async def _observe(self) -> Observation:
        """What the books alone say is left out while they cannot be read."""
        try:
            view = await self._view()
        except StorageError:
            view = None
        moment = self._moment()
        faults = " ".join(common_faults(moment))
        broken = broken_now(moment) | goes_on_with(moment) | ({ProblemKind.COMMON_FAULT: faults} if faults else {})
        capacity = view.capacity if view is not None and view.trained_step >= STEADY_STEPS else None
        return Observation(
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


def summary(view: RunView) -> str:
    """A finished run in a sentence."""
    accuracy = ""
    if view.accuracy_before is not None and view.accuracy_after is not None:
        accuracy = f", held-out accuracy {view.accuracy_before:.1%} before and {view.accuracy_after:.1%} after"
    nodes = "1 node" if view.nodes_useful == 1 else f"{view.nodes_useful} nodes"
    rollouts = f"{view.accounting.trained} rollouts" + (f" of {nodes}" if view.mode != "colocated" else "")
    return f"The run is finished: {view.trained_step} steps, {rollouts}{accuracy}."
