"""Session host: keeps the sessions of environments with state, in the hub's process. Loads no adapter's libraries.

Each call gives the host the whole conversation, so a call may be repeated. `echo_hub.sessions.core` decides what
happens; this module opens, steps and closes sessions, with a time limit for each, and turns texts into token ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, assert_never

from echo_hub.config.sessions_section import SessionsConfig
from echo_hub.sessions.core.effects import Effect, EndSession, NoteSession, OpenSession, StepSession, TellCall
from echo_hub.sessions.core.host_core import KEPT_EPISODES, HostCore
from echo_hub.sessions.turn_codec import SessionTask
from echo_hub.sessions.turns import Answer, EpisodeEnd, PlayedTurn, SessionKey, TurnAnswer
from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import (
    Ending,
    EnvironmentAway,
    EpisodeRefused,
    NoSlot,
    ProcessDied,
    Session,
    SessionGone,
)
from echo_shared.errors import ConfigError, EchoError
from echo_shared.records.rollout import SessionEvent
from echo_shared.wire.messages.fields import printable_line

log = logging.getLogger(__name__)

GROUPS_IN_HISTORY: Final = 4096
"""Number of groups whose sessions' history is kept."""
NOTES_OF_GROUP: Final = 512
"""Number of lines of one group's history that are kept."""
SOON_CHARACTERS: Final = 65_536
"""Longest observation, in characters, that the event loop itself tokenizes. A thread tokenizes longer ones, because
they would block the loop."""
_LONGEST_DETAIL: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """Task, problem and seed of one episode. Every session of the episode begins with them."""

    task: SessionTask
    problem: Problem
    seed: int


@dataclass(slots=True, kw_only=True)
class _Live:
    """A session that is open, or being opened."""

    begun: _Begun
    session: Session | None = None
    under_way: asyncio.Task[None] | None = None


class SessionHost:
    """Opens, steps and closes the sessions of all environments with state. Create it with `open`; use it on one event
    loop."""

    def __init__(self, tasks: Mapping[str, SessionTask], config: SessionsConfig) -> None:
        self._tasks = tasks
        self._config = config
        rebuilt = {key: bool(getattr(task.environment, "replay", True)) for key, task in tasks.items()}
        self._core = HostCore(rebuilt, most=config.most, age_s=config.age_s)
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._num_calls = 0
        self._begun: dict[SessionKey, _Begun] = {}
        self._live: dict[int, _Live] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._slots = self.slots
        self._changed = asyncio.Event()
        self._history: OrderedDict[int, deque[SessionEvent]] = OrderedDict()
        self._num_failures = 0
        self._is_over = False
        self._away_since: float | None = None
        self._drawing_waits = ""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, tasks: Mapping[str, SessionTask], config: SessionsConfig) -> AsyncIterator[SessionHost]:
        """Create the host of these tasks, by task key. No session and no process is left after the block."""
        host = cls(tasks, config)
        try:
            yield host
        finally:
            await host._stop()

    async def respond(
        self, key: SessionKey, task: str, *, problem: Problem, seed: int, turns: Sequence[PlayedTurn]
    ) -> Answer:
        """Return the environment's answer to the last of `turns`, which are all turns of the episode.

        Waits while no slot is free, and while the environment is away. Repeated calls with the same turns are safe,
        even after a restart: a session steps each turn once. Cancel-safe.
        """
        self._num_calls += 1
        call = self._num_calls
        told: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[call] = told
        self._forget_old()
        self._begun[key] = _Begun(task=self._tasks[task], problem=problem, seed=seed)
        try:
            self._do(self._core.asked(call, key, task, tuple(turns), time.monotonic()))
            return await told
        finally:
            if self._calls.pop(call, None) is not None and not self._is_over:
                self._do(self._core.abandoned(call, time.monotonic()))

    def close(self, key: SessionKey) -> None:
        """Close the session, if there is one, within `sessions.close_timeout_s`. Returns at once. A waiting `respond`
        of this key gets Lost. A later `respond` of the key opens a new session."""
        self._do(self._core.closed(key, time.monotonic()))
        self._begun.pop(key, None)

    @property
    def slots(self) -> int:
        """Largest number of open sessions: `sessions.most`, or fewer if an environment accepts fewer. 0 while the
        environment is away."""
        return self._core.slots.total

    @property
    def free_slots(self) -> int:
        """Slots without a session, minus the calls that wait for one; never below 0."""
        return max(0, self.slots - self._core.slots.num_open - self._core.num_waiting)

    @property
    def num_open(self) -> int:
        return self._core.slots.num_open

    @property
    def num_waiting(self) -> int:
        """Number of episodes whose calls wait for a slot."""
        return self._core.num_waiting

    @property
    def away_since(self) -> float | None:
        """Unix time since which an environment has been away; None if all can be reached."""
        return self._away_since

    async def slots_changed(self, known: int) -> int:
        """Wait until the number of slots differs from `known`, and return the new number."""
        while self.slots == known:
            self._changed.clear()
            await self._changed.wait()
        return self.slots

    @property
    def absence(self) -> str:
        """Return why sessions wait ("the environment is away: ..."); "" if none waits for an environment that is
        away."""
        return self._core.slots.absence or self._drawing_waits

    def drawing_waits(self, why: str) -> None:
        """Note why no problem can be drawn from an environment now; "" notes that one was drawn."""
        if why or self._drawing_waits:
            self._drawing_waits = printable_line(why)[:_LONGEST_DETAIL]
            self._changed.set()
            self._look_ahead()

    async def problems_known(self) -> None:
        """Wait while no problem can be drawn."""
        while self._drawing_waits:
            self._changed.clear()
            await self._changed.wait()

    def history(self, group_id: int) -> tuple[SessionEvent, ...]:
        """Return what happened to the sessions of a group's episodes, as far as it is still known."""
        return tuple(self._history.get(group_id, ()))

    def _forget_old(self) -> None:
        if len(self._begun) > 2 * KEPT_EPISODES:
            for key in [key for key in self._begun if not self._core.knows(key)]:
                del self._begun[key]

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if self._is_over and not isinstance(effect, EndSession):
                continue
            match effect:
                case OpenSession(session=number, key=key):
                    live = self._live[number] = _Live(begun=self._begun[key])
                    live.under_way = self._spawn(self._open_session(number, live))
                case StepSession(session=number, turns=turns):
                    live = self._live[number]
                    live.under_way = self._spawn(self._step_session(number, live, turns))
                case EndSession(session=number):
                    self._spawn(self._end_session(number, self._live.pop(number)))
                case TellCall(call=call, answer=answer):
                    if (told := self._calls.pop(call, None)) is not None and not told.done():
                        told.set_result(answer)
                case NoteSession():
                    self._note(effect)
                case _:
                    assert_never(effect)
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Set the timer for the core's next tick, and wake those that wait for a change of the slots."""
        if self._timer is not None:
            self._timer.cancel()
        if self._is_over:
            return
        now = time.monotonic()
        at = self._core.tick_at(now)
        loop = asyncio.get_running_loop()
        self._timer = None if at is None else loop.call_later(max(0.0, at - now), self._tick)
        self._away_since = (self._away_since or time.time()) if self.absence else None
        if self.slots != self._slots:
            self._slots = self.slots
            self._changed.set()

    def _tick(self) -> None:
        self._do(self._core.tick(time.monotonic()))

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _open_session(self, number: int, live: _Live) -> None:
        begun = live.begun
        try:
            async with asyncio.timeout(self._config.open_timeout_s):
                live.session = await begun.task.environment.open(begun.problem, begun.seed)
                begun.task.codec.check_opening(begun.problem, await live.session.reset())
        except Exception as error:  # noqa: BLE001 - Adapters are plug-ins: any exception fails their session alone.
            limit = f"sessions.open_timeout_s = {self._config.open_timeout_s:g}"
            if isinstance(error, TimeoutError) and live.session is None:
                error = EnvironmentAway(f"No session opens within {limit} s.")
            elif isinstance(error, ProcessDied):
                error = EnvironmentAway("The sessions' process has died.")
            self._fail(number, error, limit)
        else:
            self._do(self._core.opened(number, time.monotonic()))

    async def _step_session(self, number: int, live: _Live, turns: Sequence[PlayedTurn]) -> None:
        try:
            async with asyncio.timeout(self._config.step_timeout_s):
                answer = await self._stepped(live, turns)
        except Exception as error:  # noqa: BLE001 - Adapters are plug-ins: any exception fails their session alone.
            self._fail(number, error, f"sessions.step_timeout_s = {self._config.step_timeout_s:g}")
        else:
            self._do(self._core.answered(number, answer, time.monotonic()))

    async def _stepped(self, live: _Live, turns: Sequence[PlayedTurn]) -> TurnAnswer:
        """Give the last turn to the session, and return its answer. If the context is full or `max_turns` turns are
        played, ask the session for its score and end the episode."""
        session, task = live.session, live.begun.task
        assert session is not None, "only an open session steps"
        response = await session.step(task.codec.reply(turns[-1]))
        if isinstance(response, Ending):
            return EpisodeEnd(ending=response)
        most = int(getattr(task.environment, "max_turns", 0))
        if not most or len(turns) < most:
            work = (live.begun.problem, turns, response)
            is_long = len(response.text) + sum(len(each.text) for each in response.more) > SOON_CHARACTERS
            given = task.codec.next_turn
            next_turn = await asyncio.to_thread(given, *work) if is_long else given(*work)
            if next_turn is not None:
                return next_turn
        return EpisodeEnd(ending=await session.score())

    async def _end_session(self, number: int, live: _Live) -> None:
        work = live.under_way
        if work is not None and work is not asyncio.current_task() and not work.done():
            work.cancel()
            await asyncio.wait([work])
        if live.session is not None:
            try:
                async with asyncio.timeout(self._config.close_timeout_s):
                    await live.session.close()
            except Exception as error:  # noqa: BLE001 - Adapters are plug-ins: the session is over in any case.
                self._log("a session could not be closed", error)
        self._do(self._core.gone(number, time.monotonic()))

    def _fail(self, number: int, error: Exception, limit: str) -> None:
        """Tell the core why a session cannot go on. Adapters are plug-ins, so any exception counts."""
        now, luck = time.monotonic(), random.random()
        why = printable_line(error.brief if isinstance(error, EchoError) else repr(error))[:_LONGEST_DETAIL]
        match error:
            case EnvironmentAway() | ConfigError():
                effects = self._core.away(number, why, now, luck)
            case NoSlot():
                effects = self._core.full(number, error.most, now, luck)
            case EpisodeRefused():
                effects = self._core.refused(number, why, now)
            case TimeoutError():
                effects = self._core.failed(number, f"The session took longer than {limit} s.", now)
            case ProcessDied():
                effects = self._core.failed(number, why, now, is_own=False)
            case SessionGone():
                effects = self._core.failed(number, why, now)
            case _:
                self._log("a session failed", error)
                effects = self._core.failed(number, why, now)
        self._do(effects)

    def _log(self, what: str, error: Exception) -> None:
        """Log only the 1st, 2nd, 4th, 8th exception and so on: completions of the model may cause exceptions without
        end."""
        self._num_failures += 1
        if self._num_failures.bit_count() == 1:
            log.warning("%s (%d so far): %s", what, self._num_failures, printable_line(repr(error)), exc_info=error)

    def _note(self, effect: NoteSession) -> None:
        key = effect.key
        notes = self._history.setdefault(key.group_id, deque(maxlen=NOTES_OF_GROUP))
        self._history.move_to_end(key.group_id)
        while len(self._history) > GROUPS_IN_HISTORY:
            self._history.popitem(last=False)
        notes.append(
            SessionEvent(
                at=time.time(),
                index=key.index,
                attempt=key.attempt,
                kind=effect.what,
                turn=effect.turn,
                detail=effect.detail,
            )
        )
        if effect.what in ("lost", "diverged"):
            log.info("session %s of group %d: %s %s", key.index, key.group_id, effect.what, effect.detail)

    async def _stop(self) -> None:
        """Close all sessions, and end the environments' processes."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        for told in self._calls.values():
            told.cancel()
        ends = [self._end_session(number, live) for number, live in list(self._live.items())]
        self._live.clear()
        await asyncio.gather(*ends)
        while self._running:
            await asyncio.wait(list(self._running))
        for task in self._tasks.values():
            stop = getattr(task.environment, "stop", None)
            if stop is not None:
                await asyncio.to_thread(stop)
