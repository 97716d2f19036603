"""Drive the coordinator: take events, commit records, then hand out actions.

Only the driver calls the coordinator. The driver has two tasks. The first lets the coordinator handle every event as
soon as it comes. The second takes all effects (records and actions) since the last commit, commits their records in one
transaction, and then hands the actions to the hub's services. So the store holds every lease and receipt before a node
sees it. Only `BeginStep` is handed out before the commit, so that a free learner need not wait. Run events (`note`) are
committed with the next records, or alone. They wait while the store cannot be written, and never end the hub.

Events are handled for `HANDLING_S` at a time; then other tasks of the loop run. In async mode, frequent events are
collected for the same time: handling many events together costs the coordinator little more than handling one. Commits
begin `COMMIT_S` apart, because a small commit costs about as much as a large one. Actions in `_AT_ONCE`, and the first
effects after a pause, are committed at once.

A turn of an episode takes two commits: its rollout is committed before it is scored, and the next turn's lease before
it is sent. Meanwhile an environment and a node wait. So for `AWAITED_S` after each action that a turn waits for
(`_awaits`), the pauses are shorter: each lasts only as long as the work before it.

While scoring is far behind, nodes' events wait in steps of `BEHIND_S`: their queue fills, and the hub reads the nodes'
sockets more slowly. Rollouts that are received but not scored fill memory and train no policy. So a scorer that hangs
slows the nodes down, but does not stop the hub.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from echo_hub.core.accounting.effects import (
    ACTIONS,
    RECORDS,
    Action,
    AnnounceVersion,
    BeginStep,
    DeliverAnswer,
    Effect,
    FinishRun,
    PublishVersion,
    Record,
    RolloutReceived,
    ScoreRollout,
    SendLease,
    TrainStep,
    TrustDecided,
)
from echo_hub.core.accounting.events import Event, Tick
from echo_hub.core.answer_groups import is_answer
from echo_hub.core.coordinator import Coordinator
from echo_hub.dashboard.source import Changes
from echo_hub.driving.event_queue import EventQueue
from echo_hub.driving.garbage import Garbage
from echo_hub.driving.progress import RunProgress
from echo_hub.operation.events import decision_line
from echo_hub.scoring.backlog import Backlog
from echo_hub.store.async_store import AsyncStore, ReadAhead
from echo_hub.store.reading import read_payloads, read_turns
from echo_shared.errors import StorageError
from echo_shared.records.run import RunEvent

log = logging.getLogger(__name__)

MOST_EFFECTS: Final = 4_096
"""Maximum number of effects that wait for a commit. While there are more, no event is handled."""

HANDLING_S: Final = 0.01
TOGETHER: Final = 64
"""Maximum number of frequent events that the coordinator handles in one call."""
COMMIT_S: Final = 0.02
AWAITED_S: Final = 1.0
WORK_SHARE: Final = 0.5
"""Largest share of the time in which the coordinator works, or the store writes, while episodes wait for their next
turns."""
BEHIND_S: Final = 0.1
_AT_ONCE: Final = frozenset({TrainStep, PublishVersion, AnnounceVersion, FinishRun})
"""Actions that start a commit at once, instead of waiting for further effects."""

MOST_READ_AHEAD: Final = 64
"""Maximum number of later turns for which one commit reads data ahead. The limit is needed because the store writes
nothing meanwhile."""

MOST_NOTED: Final = 1_000
"""Maximum number of run events that wait for a commit. If there are more, the oldest are dropped."""

SOONEST_S: Final = 0.005
"""Shortest wait in seconds from the last event to a `Tick` event."""

TICK_S: Final = 1.0
"""Longest time in seconds until the driver asks the coordinator whether work is due. It must not rely on timers alone:
the computer's clock may be set, or the computer may sleep."""


class Services(Protocol):
    """The hub's services, which carry out the coordinator's actions (train, publish, send to a node, ...). Implemented
    by `echo_hub.serving.services.HubServices`."""

    def handle(self, action: Action) -> None:
        """Carry out the action, or queue it. Must not wait."""


class Driver:
    """The only caller of the coordinator. Events for it come from `queue`. Run events, the entries of the run's log
    (`note`), may come before `run`."""

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        store: AsyncStore,
        queue: EventQueue,
        progress: RunProgress,
        backlog: Backlog,
        changes: Changes,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`backlog` tells if scoring is far behind. `changes` is notified after each action, and when noted run events
        can be read from the store."""
        self.coordinator = coordinator
        self._loop = asyncio.get_running_loop()
        self._store = store
        self._queue = queue
        self._progress = progress
        self._backlog = backlog
        self._changes = changes
        self._clock = clock
        self._noted: list[RunEvent] = []
        """Run events that were noted and are not committed yet."""
        self._writing: asyncio.Future[None] | None = None
        """The newest commit, which may still be running."""
        self._rested_at = 0.0
        """Earliest time, by the loop's clock, at which frequent events are handled next. Until then they are
        collected."""
        self._awaited_until = 0.0
        """Time, by the loop's clock, until which the driver assumes that episodes wait for the next commit."""
        self._effects: list[Effect] = []
        """Effects since the last commit began."""
        self._there_are_effects = asyncio.Event()
        self._there_is_haste = asyncio.Event()
        """Set when an effect must be committed at once."""
        self._committed = asyncio.Event()
        self._num_handled = self._num_settled = 0
        """Number of nodes' events that the coordinator has handled, and number of those whose records are also
        committed."""
        self._has_settled = asyncio.Event()
        self._is_waited_for = False

    async def settled(self) -> None:
        """Wait until all events that nodes have put into the queue so far are handled and their records are committed.
        Only one task may wait at a time. Waits forever if the driver does not run."""
        number = self._queue.num_put
        while self._num_settled < number:
            self._is_waited_for = True
            if self._num_handled > self._num_settled:
                self._there_are_effects.set()
            self._has_settled.clear()
            await self._has_settled.wait()
        self._is_waited_for = False

    def note(self, event: RunEvent) -> None:
        self._noted.append(event)
        self._there_are_effects.set()

    def note_threadsafe(self, event: RunEvent) -> None:
        self._loop.call_soon_threadsafe(self.note, event)

    async def commit_noted(self) -> None:
        """Commit the run events that are not committed yet. Call it after `run` has ended. If the store cannot take
        them then, they are lost."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        await self._commit(())

    async def run(self, services: Services) -> None:
        """Handle events until cancelled. `services` receive each action, in order."""
        try:
            self._take(self.coordinator.start(self._clock()), services)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._handle_all(services))
                tasks.create_task(self._commit_all(services))
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            self._queue.end()

    async def _handle_all(self, services: Services) -> None:
        with Garbage() as garbage:
            while True:
                events = await self._next(garbage)
                now, until, number = self._clock(), time.perf_counter() + HANDLING_S, 0
                began_at = self._loop.time()
                while events:
                    number += len(events)
                    has_begun = self._take(self.coordinator.handle_all(events, now), services)
                    if has_begun or time.perf_counter() > until or len(self._effects) >= MOST_EFFECTS:
                        break
                    events = self._queue.take(self._most_together, of_nodes=not self._nodes_wait)
                if self._is_awaited:
                    self._rested_at = self._soon(began_at, self._rested_at)
                garbage.handled(number)
                await asyncio.sleep(0)  # Let the learner start the step before the next events are handled.
                while len(self._effects) >= MOST_EFFECTS:
                    self._committed.clear()
                    await self._committed.wait()

    def _take(self, effects: list[Effect], services: Services) -> bool:
        """Collect the effects for the next commit. Return True if one of them lets the learner begin a step, which
        needs no commit."""
        self._num_handled = self._queue.num_taken
        if self._is_waited_for:
            self._there_are_effects.set()
        begun = [effect for effect in effects if isinstance(effect, BeginStep)]
        for effect in begun:
            self._hand_out(effect, services)
        if effects:
            self._effects += effects
            self._there_are_effects.set()
            if any(map(self._awaits, effects)):
                self._awaited_until = self._loop.time() + AWAITED_S
            if not _AT_ONCE.isdisjoint(map(type, effects)) or len(self._effects) >= MOST_EFFECTS:
                self._there_is_haste.set()
        return bool(begun)

    async def _commit_all(self, services: Services) -> None:
        loop, next_at = asyncio.get_running_loop(), 0.0
        while True:
            await self._there_are_effects.wait()
            if loop.time() < next_at and any(isinstance(effect, RECORDS) for effect in self._effects):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(next_at):
                        await self._there_is_haste.wait()
            began_at = loop.time()
            next_at = began_at + COMMIT_S
            self._there_are_effects.clear()
            self._there_is_haste.clear()
            effects, self._effects, num_handled = self._effects, [], self._num_handled
            records = [effect for effect in effects if isinstance(effect, RECORDS)]
            await self._commit(records, _read_next(effects))
            if self._is_awaited:
                next_at = self._soon(began_at, next_at)
            self._progress.num_received += sum(isinstance(record, RolloutReceived) for record in records)
            for record in records:
                if isinstance(record, TrustDecided):
                    level, text, values, extra = decision_line(record)
                    log.log(level, text, *values, extra=extra)
            self._committed.set()
            self._num_settled = num_handled
            self._has_settled.set()
            for effect in effects:
                if isinstance(effect, ACTIONS) and not isinstance(effect, BeginStep):
                    self._hand_out(effect, services)
            await asyncio.sleep(0)  # Let the services take what was read ahead, before the next commit drops it.

    def _awaits(self, effect: Effect) -> bool:
        """Return True if an episode or a tenant's program waits for the commit of this effect."""
        match effect:
            case SendLease():
                return effect.turn > 0 or is_answer(effect.group_id)
            case ScoreRollout():
                return self.coordinator.settings.multi_turn
            case DeliverAnswer():
                return True
        return False

    @property
    def _is_awaited(self) -> bool:
        return self._loop.time() < self._awaited_until

    def _soon(self, began_at: float, at: float) -> float:
        """Return the time at which coordinator or store may begin new work. The last work began at `began_at` and has
        just ended. This is `at`; or an earlier time, if work then takes at most WORK_SHARE of the time."""
        return min(at, began_at + (self._loop.time() - began_at) / WORK_SHARE)

    def _hand_out(self, action: Action, services: Services) -> None:
        services.handle(action)
        self._changes.notify()

    async def _commit(self, records: Sequence[Record], ahead: Sequence[ReadAhead] = ()) -> None:
        events, self._noted = self._noted, []
        if not records and not events:
            return
        # Shield the commit: a started write is completed even after this task's cancellation.
        self._writing = asyncio.ensure_future(self._store.apply(records, self._clock(), events, ahead=ahead))
        self._writing.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.shield(self._writing)
        except StorageError:
            if records:
                raise
            self._noted = [*events, *self._noted][-MOST_NOTED:]
        else:
            if events:
                self._changes.notify()

    @property
    def _nodes_wait(self) -> bool:
        """True while nodes' events wait because scoring is far behind. Always False in co-located and sequential mode,
        which lease one batch at a time."""
        return self.coordinator.settings.mode == "async" and self._backlog.is_far

    @property
    def _most_together(self) -> int:
        """Maximum number of events in one call of the coordinator; 1 in co-located and sequential mode, whose batches
        must not depend on the timing of events."""
        return TOGETHER if self.coordinator.settings.mode == "async" else 1

    async def _next(self, garbage: Garbage) -> list[Event]:
        """Return the next events. If none comes before the coordinator is due (`due_at`), return a `Tick`."""
        if self._queue:
            return await self._take_in_time()
        due = self.coordinator.due_at()
        wait_s = None if due is None else min(TICK_S, max(SOONEST_S, due - self._clock()))
        try:
            async with asyncio.timeout(wait_s):
                await self._queue.wait()
        except TimeoutError:
            if wait_s == TICK_S:  # Nothing was due within TICK_S: the hub is idle.
                garbage.quiet()
            return [Tick()]
        return await self._take_in_time()

    async def _take_in_time(self) -> list[Event]:
        """Return the next events. To collect frequent events, wait until `HANDLING_S` after the last time that events
        were handled. While scoring is far behind, wait up to `BEHIND_S` longer for the hub's own events."""
        most, loop = self._most_together, asyncio.get_running_loop()
        if most > 1:
            if loop.time() < self._rested_at:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._rested_at):
                        await self._queue.wait_for_others()
            self._rested_at = loop.time() + HANDLING_S
        if self._nodes_wait:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEHIND_S):
                    await self._queue.wait_for_own()
        return self._queue.take(most)


def _read_next(effects: Sequence[Effect]) -> list[ReadAhead]:
    """Return the queries for data that the services need as soon as these effects are committed: the rollouts to score,
    and the conversations of the next leases."""
    scored = [effect.rollout_id for effect in effects if isinstance(effect, ScoreRollout) and effect.first_turn is None]
    leased = {(one.group_id, one.indices[0]) for one in effects if isinstance(one, SendLease) and one.turn}
    queries = [ReadAhead(read_payloads, scored), ReadAhead(read_turns, leased)]
    return [one for one in queries if 0 < len(one.keys) <= MOST_READ_AHEAD]
