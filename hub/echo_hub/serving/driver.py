"""Carries the coordinator: events in, records committed, then actions out.

The only one that touches the coordinator. Two tasks: one lets the coordinator handle every event as soon as it comes;
the other takes all that has come of it since its last commit, commits the records in one transaction, and only then
hands the actions on. So nobody ever sees a lease or a receipt that is not in the store. `BeginStep` alone is handed on
as soon as it is said: a learner that is free waits for no commit. What has happened beside the coordinator (`note`)
is committed with the next turn, or alone where there is none; it is not worth a hub, and waits where it cannot be.

Events are handled for `HANDLING_S` at a time, then the loop's other work has its turn. What comes by the thousand is
gathered for as long, but in lock-step modes: a turn costs much the same however many events it has. Commits begin
`COMMIT_S` apart, for a small one costs as much as many rollouts in a large one; what the learner or a new version waits
for, and what comes after a pause, is committed at once.

While scoring is far behind, what nodes say waits, down to their sockets, for `BEHIND_S` at a time: what is received
and not scored is kept in memory, and trains nobody. So a scorer that stands still makes nodes slow, and stops nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from echo_hub.core.coordinator import Coordinator
from echo_hub.core.effects import (
    ACTIONS,
    RECORDS,
    Action,
    AnnounceVersion,
    BeginStep,
    Effect,
    FinishRun,
    PublishVersion,
    Record,
    RolloutReceived,
    TrainStep,
    TrustDecided,
)
from echo_hub.core.events import Event, RolloutArrived, Tick
from echo_hub.operation.events import decision_line
from echo_hub.serving.garbage import Garbage
from echo_hub.serving.inbox import Inbox
from echo_hub.store.async_store import AsyncStore
from echo_shared.books import RunEvent
from echo_shared.errors import StorageError

log = logging.getLogger(__name__)

MOST_EFFECTS: Final = 4_096
"""While so many wait for a commit, nothing more is handled."""

HANDLING_S: Final = 0.01
TOGETHER: Final = 64
"""Events of a kind that comes by the thousand, in one turn of the coordinator's."""
COMMIT_S: Final = 0.02
BEHIND_S: Final = 0.1
_AT_ONCE: Final = frozenset({TrainStep, PublishVersion, AnnounceVersion, FinishRun})
"""What is not held back for others."""

MOST_NOTED: Final = 1_000
"""What has happened and cannot be committed; above it the oldest are let go."""

SOONEST_S: Final = 0.005
"""The coordinator is told the time no sooner than this after it last heard something."""

TICK_S: Final = 1.0
"""While it waits for a moment it is told the time at least so often: a computer's clock may be set, or have slept."""


class Driver:
    """The coordinator's driver. `report` and `note` from anywhere on the loop, also before `run`; `noted` is called
    when what was noted can be read from the store, `arrived` makes of a rollout that has come in what the coordinator
    is told, `is_behind` says whether scoring is far behind what has come in."""

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        store: AsyncStore,
        clock: Callable[[], float],
        noted: Callable[[], object] = lambda: None,
        arrived: Callable[[RolloutArrived], RolloutArrived] = lambda event: event,
        is_behind: Callable[[], bool] = lambda: False,
    ) -> None:
        self.coordinator = coordinator
        self._is_behind = is_behind
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
        self._inbox = Inbox()
        self._rested_at = 0.0
        """By the loop's clock: what comes by the thousand is handled no sooner."""
        self._effects: list[Effect] = []
        """Of all that was handled since the last commit began."""
        self._there_are_effects = asyncio.Event()
        self._there_is_haste = asyncio.Event()
        """Somebody waits for what is among them."""
        self._committed = asyncio.Event()
        self._num_handled = self._num_settled = 0
        """Events of nodes that were handled, and of these those whose records are committed."""
        self._has_settled = asyncio.Event()
        self._is_waited_for = False

    async def report(self, event: Event) -> None:
        """Waits while the inbox is full. Once `run` has ended, nobody listens and nobody waits."""
        await self._inbox.put(self._arrived(event) if isinstance(event, RolloutArrived) else event)

    async def settled(self) -> None:
        """Returns once all that nodes have said by now is handled, and what came of it is committed; never, when that
        is not to be. One waits at a time."""
        number = self._inbox.num_said
        while self._num_settled < number:
            self._is_waited_for = True
            if self._num_handled > self._num_settled:
                self._there_are_effects.set()
            self._has_settled.clear()
            await self._has_settled.wait()
        self._is_waited_for = False

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
            self._inbox.end()

    async def _handle_all(self, act: Callable[[Action], None]) -> None:
        with Garbage() as garbage:
            while True:
                events = await self._next(garbage)
                now, until, number = self._clock(), time.perf_counter() + HANDLING_S, 0
                while events:
                    number += len(events)
                    has_begun = self._take(self.coordinator.handle_all(events, now), act)
                    if has_begun or time.perf_counter() > until or len(self._effects) >= MOST_EFFECTS:
                        break
                    events = self._inbox.take(self._most_together, of_nodes=not self._nodes_wait)
                garbage.handled(number)
                await asyncio.sleep(0)  # A step that was begun does not wait for the events behind it, either.
                while len(self._effects) >= MOST_EFFECTS:
                    self._committed.clear()
                    await self._committed.wait()

    def _take(self, effects: list[Effect], act: Callable[[Action], None]) -> bool:
        """Whether the learner may begin a step."""
        self._num_handled = self._inbox.num_taken
        if self._is_waited_for:
            self._there_are_effects.set()
        begun = [effect for effect in effects if isinstance(effect, BeginStep)]
        for effect in begun:
            act(effect)
        if effects:
            self._effects += effects
            self._there_are_effects.set()
            if not _AT_ONCE.isdisjoint(map(type, effects)) or len(self._effects) >= MOST_EFFECTS:
                self._there_is_haste.set()
        return bool(begun)

    async def _commit_all(self, act: Callable[[Action], None]) -> None:
        loop, next_at = asyncio.get_running_loop(), 0.0
        while True:
            await self._there_are_effects.wait()
            if loop.time() < next_at and any(isinstance(effect, RECORDS) for effect in self._effects):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(next_at):
                        await self._there_is_haste.wait()
            next_at = loop.time() + COMMIT_S
            self._there_are_effects.clear()
            self._there_is_haste.clear()
            effects, self._effects, num_handled = self._effects, [], self._num_handled
            records = [effect for effect in effects if isinstance(effect, RECORDS)]
            await self._commit(records)
            self.num_received += sum(isinstance(record, RolloutReceived) for record in records)
            for record in records:
                if isinstance(record, TrustDecided):
                    level, text, values, extra = decision_line(record)
                    log.log(level, text, *values, extra=extra)
            self._committed.set()
            self._num_settled = num_handled
            self._has_settled.set()
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

    @property
    def _nodes_wait(self) -> bool:
        """In lock-step modes no more than a step's batch is ever under way: that is bound enough."""
        return self.coordinator.settings.mode == "async" and self._is_behind()

    @property
    def _most_together(self) -> int:
        """Events. In lock-step modes each has a turn of its own, so that what a step takes does not depend on what
        happened to come at once."""
        return TOGETHER if self.coordinator.settings.mode == "async" else 1

    async def _next(self, garbage: Garbage) -> list[Event]:
        """The next events, or the time when the coordinator asks to be told it."""
        if self._inbox:
            return await self._take_in_time()
        due = self.coordinator.due_at()
        wait_s = None if due is None else min(TICK_S, max(SOONEST_S, due - self._clock()))
        try:
            async with asyncio.timeout(wait_s):
                await self._inbox.wait()
        except TimeoutError:
            if wait_s == TICK_S:  # Nor was there anything due.
                garbage.quiet()
            return [Tick()]
        return await self._take_in_time()

    async def _take_in_time(self) -> list[Event]:
        """What comes by the thousand waits for more of it, until `HANDLING_S` after the last turn began."""
        most, loop = self._most_together, asyncio.get_running_loop()
        if most > 1:
            if loop.time() < self._rested_at:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._rested_at):
                        await self._inbox.wait_for_others()
            self._rested_at = loop.time() + HANDLING_S
        if self._nodes_wait:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEHIND_S):
                    await self._inbox.wait_for_own()
        return self._inbox.take(most)
