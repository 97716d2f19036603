"""Carries the coordinator: events in, records committed, then actions out.

The only one that touches the coordinator. Two tasks: one lets the coordinator handle every event as soon as it comes;
the other takes all that has come of it since its last commit, commits the records in one transaction, and only then
hands the actions on. So nobody ever sees a lease or a receipt that is not in the store. `BeginStep` alone is handed on
as soon as it is said: a learner that is free waits for no commit. What has happened beside the coordinator (`note`)
is committed with the next turn, or alone where there is none; it is not worth a hub, and waits where it cannot be.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from echo_hub.core.coordinator import Coordinator
from echo_hub.core.effects import (
    ACTIONS,
    RECORDS,
    Action,
    BeginStep,
    Effect,
    Record,
    RolloutReceived,
    TrustDecided,
)
from echo_hub.core.events import Event, RolloutArrived, Tick
from echo_hub.garbage import Garbage
from echo_hub.operation.events import decision_line
from echo_hub.store.async_store import AsyncStore
from echo_shared.books import RunEvent
from echo_shared.errors import StorageError

log = logging.getLogger(__name__)

INBOX_EVENTS: Final = 8_192
"""When full, those who report events wait, down to the nodes' sockets."""

MOST_EFFECTS: Final = 32_768
"""While so many wait for a commit, nothing more is handled."""

MOST_NOTED: Final = 1_000
"""What has happened and cannot be committed; above it the oldest are let go."""

SOONEST_S: Final = 0.005
"""The coordinator is told the time no sooner than this after it last heard something."""

TICK_S: Final = 1.0
"""While it waits for a moment it is told the time at least so often: a computer's clock may be set, or have slept."""


class Driver:
    """The coordinator's driver. `report` and `note` from anywhere on the loop, also before `run`; `noted` is called
    when what was noted can be read from the store, `arrived` makes of a rollout that has come in what the coordinator
    is told."""

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        store: AsyncStore,
        clock: Callable[[], float],
        noted: Callable[[], object] = lambda: None,
        arrived: Callable[[RolloutArrived], RolloutArrived] = lambda event: event,
    ) -> None:
        self.coordinator = coordinator
        self._arrived = arrived
        self.num_received = 0
        """Rollouts committed since the start."""
        self._store = store
        self._clock = clock
        self._noted = noted
        self._events: list[RunEvent] = []
        """What was noted and is not committed."""
        self._writing: asyncio.Future[None] | None = None
        """The newest commit, which may be under way."""
        self._inbox: asyncio.Queue[Event] = asyncio.Queue(INBOX_EVENTS)
        self._effects: list[Effect] = []
        """Of all that was handled since the last commit began."""
        self._there_are_effects = asyncio.Event()
        self._committed = asyncio.Event()
        self._ended = False

    async def report(self, event: Event) -> None:
        """Waits while the inbox is full. Once `run` has ended, nobody listens and nobody waits."""
        if not self._ended:
            await self._inbox.put(self._arrived(event) if isinstance(event, RolloutArrived) else event)

    def note(self, event: RunEvent) -> None:
        """Has it written down with the next turn."""
        self._events.append(event)
        self._there_are_effects.set()

    async def commit_noted(self) -> None:
        """Writes down what was noted last; once `run` has ended. What the store does not take is lost."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        await self._commit(())

    async def run(self, act: Callable[[Action], None]) -> None:
        """Works for ever. `act` is called with each action, in order, and must not wait."""
        try:
            self._take(self.coordinator.start(self._clock()), act)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._handle_all(act))
                tasks.create_task(self._commit_all(act))
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            self._ended = True
            self._waiting()  # Makes room for those who wait to report, so that they can end.

    async def _handle_all(self, act: Callable[[Action], None]) -> None:
        with Garbage() as garbage:
            while True:
                events = [await self._next(garbage), *self._waiting()]
                garbage.handled(len(events))
                now = self._clock()
                for event in events:
                    if self._take(self.coordinator.handle(event, now), act):
                        await asyncio.sleep(0)  # Nor does it wait for the events behind.
                while len(self._effects) >= MOST_EFFECTS:
                    self._committed.clear()
                    await self._committed.wait()

    def _take(self, effects: list[Effect], act: Callable[[Action], None]) -> bool:
        """Whether the learner may begin a step."""
        begun = [effect for effect in effects if isinstance(effect, BeginStep)]
        for effect in begun:
            act(effect)
        if effects:
            self._effects += effects
            self._there_are_effects.set()
        return bool(begun)

    async def _commit_all(self, act: Callable[[Action], None]) -> None:
        while True:
            await self._there_are_effects.wait()
            self._there_are_effects.clear()
            effects, self._effects = self._effects, []
            records = [effect for effect in effects if isinstance(effect, RECORDS)]
            await self._commit(records)
            self.num_received += sum(isinstance(record, RolloutReceived) for record in records)
            for record in records:
                if isinstance(record, TrustDecided):
                    level, text, values, extra = decision_line(record)
                    log.log(level, text, *values, extra=extra)
            self._committed.set()
            for effect in effects:
                if isinstance(effect, ACTIONS) and not isinstance(effect, BeginStep):
                    act(effect)

    async def _commit(self, records: Sequence[Record]) -> None:
        events, self._events = self._events, []
        if not records and not events:
            return
        # Cancelled, it goes on by itself: nobody could say whether the store has begun with it.
        self._writing = asyncio.ensure_future(self._store.apply(records, self._clock(), events))
        self._writing.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.shield(self._writing)
        except StorageError:
            if records:
                raise
            self._events = [*events, *self._events][-MOST_NOTED:]
        else:
            if events:
                self._noted()

    def _waiting(self) -> list[Event]:
        return [self._inbox.get_nowait() for _ in range(self._inbox.qsize())]

    async def _next(self, garbage: Garbage) -> Event:
        """The next event, or the time when the coordinator asks to be told it."""
        due = self.coordinator.due_at()
        wait_s = None if due is None else min(TICK_S, max(SOONEST_S, due - self._clock()))
        try:
            async with asyncio.timeout(wait_s):
                return await self._inbox.get()
        except TimeoutError:
            if wait_s == TICK_S:  # Nor was there anything due.
                garbage.quiet()
            return Tick()
