"""Carries the coordinator: events in, one commit a turn, then actions out.

The only task that touches the coordinator. It takes all events that wait, lets the coordinator handle each, commits
every record in one transaction, and only then hands the actions on. So nobody ever sees a lease or a receipt that is
not in the store. Where an event gives the learner a step, what waits behind it waits for another turn: a learner that
is free is told as soon as can be.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from echo_hub.core.coordinator import Coordinator
from echo_hub.core.effects import ACTIONS, RECORDS, Action, Effect, RolloutReceived, TrainStep
from echo_hub.core.events import Event, Tick
from echo_hub.garbage import Garbage
from echo_hub.store.async_store import AsyncStore

INBOX_EVENTS: Final = 8_192
"""When full, those who report events wait, down to the nodes' sockets."""

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
        self._ended = False

    async def report(self, event: Event) -> None:
        """Waits while the inbox is full. Once `run` has ended, nobody listens and nobody waits."""
        if not self._ended:
            await self._inbox.put(event)

    async def run(self, act: Callable[[Action], None]) -> None:
        """Works for ever. `act` is called with each action, in order, and must not wait."""
        try:
            await self._carry_out(self.coordinator.start(self._clock()), act)
            with Garbage() as garbage:
                while True:
                    events = deque([await self._next(garbage), *self._waiting()])
                    garbage.handled(len(events))
                    while events:
                        await self._carry_out(self._handle(events), act)
        finally:
            self._ended = True
            self._waiting()  # Makes room for those who wait to report, so that they can end.

    def _handle(self, events: deque[Event]) -> list[Effect]:
        """Takes events from the left, all or as far as a step for the learner."""
        now = self._clock()
        effects: list[Effect] = []
        while events:
            of_event = self.coordinator.handle(events.popleft(), now)
            effects += of_event
            if any(isinstance(effect, TrainStep) for effect in of_event):
                break
        return effects

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

    async def _carry_out(self, effects: list[Effect], act: Callable[[Action], None]) -> None:
        records = [effect for effect in effects if isinstance(effect, RECORDS)]
        if records:
            await self._store.apply(records, self._clock())
            self.num_received += sum(isinstance(record, RolloutReceived) for record in records)
        for effect in effects:
            if isinstance(effect, ACTIONS):
                act(effect)
