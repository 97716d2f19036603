"""Carries the coordinator: events in, records committed, then actions out.

The only one that touches the coordinator. Two tasks: one lets the coordinator handle every event as soon as it comes;
the other takes all that has come of it since its last commit, commits the records in one transaction, and only then
hands the actions on. So nobody ever sees a lease or a receipt that is not in the store. `BeginStep` alone is handed on
as soon as it is said: a learner that is free waits for no commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from echo_hub.core.coordinator import Coordinator
from echo_hub.core.effects import ACTIONS, RECORDS, Action, BeginStep, Effect, RolloutReceived
from echo_hub.core.events import Event, Tick
from echo_hub.garbage import Garbage
from echo_hub.store.async_store import AsyncStore

INBOX_EVENTS: Final = 8_192
"""When full, those who report events wait, down to the nodes' sockets."""

MOST_EFFECTS: Final = 32_768
"""While so many wait for a commit, nothing more is handled."""

SOONEST_S: Final = 0.005
"""The coordinator is told the time no sooner than this after it last heard something."""

TICK_S: Final = 1.0
"""While it waits for a moment it is told the time at least so often: a computer's clock may be set, or have slept."""


class Driver:
    """The coordinator's driver. `report` from anywhere on the loop, also before `run`."""

    def __init__(self, *, coordinator: Coordinator, store: AsyncStore, clock: Callable[[], float]) -> None:
        self.coordinator = coordinator
        self.num_received = 0
        """Rollouts committed since the start."""
        self._store = store
        self._clock = clock
        self._inbox: asyncio.Queue[Event] = asyncio.Queue(INBOX_EVENTS)
        self._effects: list[Effect] = []
        """Of all that was handled since the last commit began."""
        self._there_are_effects = asyncio.Event()
        self._committed = asyncio.Event()
        self._ended = False

    async def report(self, event: Event) -> None:
        """Waits while the inbox is full. Once `run` has ended, nobody listens and nobody waits."""
        if not self._ended:
            await self._inbox.put(event)

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
            if records:
                await self._store.apply(records, self._clock())
                self.num_received += sum(isinstance(record, RolloutReceived) for record in records)
            self._committed.set()
            for effect in effects:
                if isinstance(effect, ACTIONS) and not isinstance(effect, BeginStep):
                    act(effect)

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
