"""Core of a session host: events in, effects out. It decides when sessions open, step and close, and what calls get.

    call 1 asks for the answer to turn 0     OpenSession, StepSession(turn=0), TellCall(the answer)
    call 2 asks for the answer to turn 1     StepSession(turn=1), TellCall(the answer)
    call 3 repeats call 2                    TellCall(the same answer)
    call 4, after the session has died       OpenSession, StepSession(turn=0), ... up to the last turn, TellCall(...)

A session steps through the turns of a call in order, and takes each turn once. Earlier turns of a rebuilt session must
get the answers that are stored. At the first difference the call gets `Diverged`, and the session stays where it is, so
that the episode can go on from the new answer.

A session that fails is rebuilt. A call gets `Lost` after `REBUILDS` rebuilds, or at once if the task's sessions cannot
be rebuilt. An environment that is away or full fails nothing: its calls wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from echo_hub.sessions.core.effects import (
    Effect,
    EndSession,
    NoteSession,
    OpenSession,
    StepSession,
    TellCall,
)
from echo_hub.sessions.core.waiting import Slots
from echo_hub.sessions.turns import (
    Answer,
    Diverged,
    EpisodeEnd,
    Lost,
    NextTurn,
    PlayedTurn,
    SessionKey,
    TurnAnswer,
    turns_digest,
)
from echo_shared.records.rollout import SessionEventKind

KEPT_EPISODES: Final = 16_384
"""Number of known episodes above which the oldest episodes without a session are forgotten."""
REBUILDS: Final = 2
"""Number of rebuilds of a session for one turn. If the last one fails too, the session counts as lost."""

_State = Literal["none", "waiting", "opening", "idle", "stepping"]


@dataclass(slots=True, kw_only=True)
class _Call:
    """A call that has no answer yet. Calls with the same turns get the same answer."""

    ids: list[int]
    turns: Sequence[PlayedTurn]
    digest: bytes

    @property
    def last(self) -> int:
        return len(self.turns) - 1


@dataclass(slots=True, kw_only=True)
class _Episode:
    """An episode, with its session if it has one."""

    key: SessionKey
    task: str
    state: _State = "none"
    session: int = -1
    opened_at: float = 0.0
    position: int = 0
    """Number of turns that the session has answered."""
    stands_at: bytes = b""
    """Digest of the answered turns and their answers. The session can take only a turn that follows exactly these."""
    call: _Call | None = None
    """The call that the session works for."""
    later: deque[_Call] = field(default_factory=deque)
    """Calls with other turns. They wait until the current call is over."""
    told: tuple[bytes, Answer] | None = None
    """Digest of the turns of the last answered call, and the answer, to answer a repeated call."""
    num_failures: int = 0
    """Number of sessions that failed by themselves since the last answer."""
    why_failed: str = ""
    """Why the newest failed session since the last answer failed; "" if none failed."""
    is_after_failure: bool = False
    """True if the session replaces one that failed."""
    has_begun: bool = False
    """True if an earlier session of this episode has taken a turn."""


class HostCore:
    """Decides for all sessions of a host: takes events, returns effects. `now` is a monotonic time in seconds."""

    def __init__(self, tasks: Mapping[str, bool], *, most: int, age_s: float) -> None:
        """`tasks` maps each task to True if its sessions can be rebuilt by replaying their turns. `most` is the number
        of slots, `age_s` the seconds since its opening after which an idle session is closed."""
        self.slots = Slots(tasks, most=most)
        self._tasks = tasks
        self._age_s = age_s
        self._episodes: dict[tuple[int, int], _Episode] = {}
        self._by_session: dict[int, _Episode] = {}
        self._closing: dict[int, str] = {}
        """Task of each session that is being closed."""
        self._waiting: deque[_Episode] = deque()
        """Episodes that wait for a slot. Episodes that have already taken a turn are in front."""
        self._num_sessions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def knows(self, key: SessionKey) -> bool:
        episode = self._episodes.get((key.group_id, key.index))
        return episode is not None and episode.key == key

    def asked(self, call: int, key: SessionKey, task: str, turns: Sequence[PlayedTurn], now: float) -> list[Effect]:
        """Handle a new call, which wants the answer to the last of `turns`."""
        place = (key.group_id, key.index)
        episode = self._episodes.get(place)
        effects: list[Effect] = []
        if episode is not None and episode.key.attempt != key.attempt:
            if key.attempt < episode.key.attempt:
                return [TellCall(call=call, answer=Lost(detail="The episode has started again.", is_loss=False))]
            effects += self.closed(episode.key, now)
            episode = None
        if episode is None:
            self._forget_old()
            episode = self._episodes[place] = _Episode(key=key, task=task)
        digest = turns_digest(turns)
        if episode.told is not None and episode.told[0] == digest:
            return [*effects, TellCall(call=call, answer=episode.told[1])]
        for other in (episode.call, *episode.later):
            if other is not None and other.digest == digest:
                other.ids.append(call)
                return effects
        episode.later.append(_Call(ids=[call], turns=turns, digest=digest))
        if episode.call is None:
            effects += self._next_call(episode, now)
        return effects

    def abandoned(self, call: int, now: float) -> list[Effect]:
        """Handle a cancelled call. The episode's session, if any, stays open for later calls."""
        for episode in self._episodes.values():
            for one in (episode.call, *episode.later):
                if one is not None and call in one.ids:
                    one.ids.remove(call)
                    if not one.ids and one is not episode.call:
                        episode.later.remove(one)
                    elif not one.ids and episode.state == "waiting":
                        self._waiting.remove(episode)
                        episode.state = "none"
                        return self._next_call(episode, now)
                    return []
        return []

    def opened(self, session: int, now: float) -> list[Effect]:
        """Handle a session that is now open and has begun its episode with the problem's prompt."""
        episode = self._by_session.get(session)
        if episode is None:
            return []
        self.slots.opened(episode.task, session)
        episode.opened_at, episode.position, episode.stands_at = now, 0, turns_digest(())
        episode.state = "idle"
        what: SessionEventKind = (
            "rebuilt" if episode.has_begun or (episode.call is not None and episode.call.last) else "opened"
        )
        note = NoteSession(key=episode.key, what=what, detail=episode.why_failed)
        return [note, *self._go_on(episode, now), *self._fill_slots(now)]

    def answered(self, session: int, answer: TurnAnswer, now: float) -> list[Effect]:
        """Handle the session's answer to the turn that it got from StepSession."""
        episode = self._by_session.get(session)
        if episode is None or episode.call is None:
            return []
        call, turn = episode.call, episode.position
        episode.state = "idle"
        episode.position += 1
        if turn == call.last:
            self._stand_at(episode, call.turns, answer)
            return self._tell(episode, answer, now)
        known = call.turns[turn].observation_ids
        if isinstance(answer, NextTurn) and np.array_equal(answer.observation_ids, known):
            episode.stands_at = turns_digest(call.turns[: turn + 1])
            return self._go_on(episode, now)
        self._stand_at(episode, call.turns[: turn + 1], answer)
        note = NoteSession(key=episode.key, what="diverged", turn=turn)
        diverged = Diverged(turn=turn, answer=answer, is_loss=episode.is_after_failure)
        return [note, *self._tell(episode, diverged, now)]

    def failed(self, session: int, why: str, now: float, *, is_own: bool = True) -> list[Effect]:
        """Handle a session that has failed, is lost, or took too long. `is_own` False: the session ended only because
        the process of all sessions ended, which never counts as a loss."""
        episode = self._by_session.get(session)
        if episode is None:
            return []
        effects = self._end(episode)
        episode.is_after_failure |= is_own
        if episode.call is None:
            return effects
        episode.why_failed = why
        episode.num_failures += is_own
        if episode.num_failures > REBUILDS or not self._may_rebuild(episode):
            return [*effects, *self._lose(episode, why, now, is_loss=is_own)]
        return [*effects, *self._wait(episode, now)]

    def refused(self, session: int, why: str, now: float) -> list[Effect]:
        """Handle the environment's refusal to continue an episode, in this session or in a new one."""
        episode = self._by_session.get(session)
        if episode is None or episode.call is None:
            return []
        call, turn, answer = episode.call, episode.position, EpisodeEnd(ending=None, refusal=why)
        effects = self._end(episode)
        if turn == call.last:
            return [*effects, *self._tell(episode, answer, now)]
        diverged = Diverged(turn=turn, answer=answer, is_loss=episode.is_after_failure)
        note = NoteSession(key=episode.key, what="diverged", turn=turn, detail=why)
        return [*effects, note, *self._tell(episode, diverged, now)]

    def away(self, session: int, why: str, now: float, luck: float) -> list[Effect]:
        """Handle an environment that does not answer. The call waits; later its session is opened again or rebuilt.
        `luck`, random in [0, 1), spreads the tries."""
        episode = self._by_session.get(session)
        if episode is None:
            return []
        self.slots.is_away(episode.task, why, now, luck)
        return self._again(episode, why, now)

    def full(self, session: int, most: int | None, now: float, luck: float) -> list[Effect]:
        """Handle an environment that has no slot for this session. `most` is its number of slots, if it says so."""
        episode = self._by_session.get(session)
        if episode is None:
            return []
        self.slots.is_full(episode.task, session, most, now, luck)
        return self._again(episode, "", now)

    def gone(self, session: int, now: float) -> list[Effect]:
        """Handle a session that is closed: its slot is free."""
        task = self._closing.pop(session, None)
        if task is None:
            return []
        self.slots.freed(task, session)
        return self._fill_slots(now)

    def closed(self, key: SessionKey, now: float) -> list[Effect]:
        """Handle the end or restart of an episode: close its session. Waiting calls get Lost."""
        episode = self._episodes.get((key.group_id, key.index))
        if episode is None or episode.key != key:
            return []
        del self._episodes[(key.group_id, key.index)]
        effects: list[Effect] = []
        if episode.state == "waiting":
            self._waiting.remove(episode)
        if episode.session >= 0:
            effects += [*self._end(episode), NoteSession(key=key, what="closed")]
        lost = Lost(detail="The session was closed.", is_loss=False)
        for one in (episode.call, *episode.later):
            if one is not None:
                effects += [TellCall(call=call, answer=lost) for call in one.ids]
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Close idle sessions that were opened too long ago, and try again to reach environments that were away."""
        effects: list[Effect] = []
        for episode in list(self._by_session.values()):
            if episode.state == "idle" and now - episode.opened_at >= self._age_s:
                effects += [*self._end(episode), NoteSession(key=episode.key, what="closed", detail="its age")]
        return [*effects, *self._fill_slots(now)]

    def tick_at(self, now: float) -> float | None:
        """Return the time at which `tick` has something to do; None if only another event can change that."""
        ages = [one.opened_at + self._age_s for one in self._by_session.values() if one.state == "idle"]
        trial = self.slots.next_try_at({episode.task for episode in self._waiting}, now)
        return min([*ages, *([] if trial is None else [trial])], default=None)

    def _forget_old(self) -> None:
        """Forget the oldest episodes without session and calls, above KEPT_EPISODES. Later calls rebuild their
        sessions."""
        excess = len(self._episodes) + 1 - KEPT_EPISODES
        if excess > 0:
            old = [place for place, one in self._episodes.items() if one.session < 0 and one.call is None]
            for place in old[:excess]:
                del self._episodes[place]

    def _next_call(self, episode: _Episode, now: float) -> list[Effect]:
        """Begin the episode's next waiting call."""
        episode.call = episode.later.popleft() if episode.later else None
        call = episode.call
        effects: list[Effect] = []
        if call is None:
            return effects
        if episode.state == "idle":
            if turns_digest(call.turns[:-1]) == episode.stands_at:
                return self._go_on(episode, now)
            effects = self._end(episode)
        if not self._may_rebuild(episode):
            why = "The environment's sessions cannot be rebuilt."
            return [*effects, *self._lose(episode, why, now, is_loss=episode.is_after_failure)]
        return [*effects, *self._wait(episode, now)]

    def _may_rebuild(self, episode: _Episode) -> bool:
        has_turns = episode.has_begun or (episode.call is not None and episode.call.last > 0)
        return self._tasks[episode.task] or not has_turns

    def _wait(self, episode: _Episode, now: float) -> list[Effect]:
        """Let the episode wait for a slot: at the queue's front if it has taken a turn, else at the end."""
        episode.state = "waiting"
        if episode.has_begun or (episode.call is not None and episode.call.last):
            self._waiting.appendleft(episode)
        else:
            self._waiting.append(episode)
        return self._fill_slots(now)

    def _fill_slots(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for episode in list(self._waiting):
            if self.slots.all_taken:
                break
            if not self.slots.may_open(episode.task, now):
                continue
            assert episode.call is not None, "only calls wait"
            self._waiting.remove(episode)
            self._num_sessions += 1
            episode.session, episode.state = self._num_sessions, "opening"
            self._by_session[episode.session] = episode
            self.slots.taken(episode.task, episode.session)
            effects.append(OpenSession(session=episode.session, key=episode.key))
        return effects

    def _go_on(self, episode: _Episode, now: float) -> list[Effect]:
        """Give the session the next turn of its call."""
        call = episode.call
        if call is None:
            return self._next_call(episode, now)
        episode.state, episode.has_begun = "stepping", True
        return [StepSession(session=episode.session, turns=tuple(call.turns[: episode.position + 1]))]

    def _stand_at(self, episode: _Episode, turns: Sequence[PlayedTurn], answer: TurnAnswer) -> None:
        """Record that the session has answered the last of `turns`."""
        if isinstance(answer, NextTurn):
            last = turns[-1]
            answered = PlayedTurn(
                completion_ids=last.completion_ids,
                finish_reason=last.finish_reason,
                observation_ids=answer.observation_ids,
            )
            episode.stands_at = turns_digest([*turns[:-1], answered])

    def _tell(self, episode: _Episode, answer: Answer, now: float) -> list[Effect]:
        """Answer the episode's current call, and begin its next one."""
        call = episode.call
        assert call is not None, "there is a call to answer"
        episode.told, episode.call = (call.digest, answer), None
        episode.num_failures, episode.why_failed = 0, ""
        ended = answer.answer if isinstance(answer, Diverged) else answer
        effects: list[Effect] = [TellCall(call=one, answer=answer) for one in call.ids]
        if isinstance(answer, NextTurn | EpisodeEnd):
            episode.is_after_failure = False
        if isinstance(ended, EpisodeEnd) and episode.session >= 0:
            effects += self._end(episode)
        return [*effects, *self._next_call(episode, now)]

    def _lose(self, episode: _Episode, why: str, now: float, *, is_loss: bool) -> list[Effect]:
        call = episode.call
        assert call is not None, "there is a call to answer"
        episode.call, episode.told = None, None
        episode.num_failures, episode.why_failed = 0, ""
        note = NoteSession(key=episode.key, what="lost", turn=call.last, detail=why)
        told = [TellCall(call=one, answer=Lost(detail=why, is_loss=is_loss)) for one in call.ids]
        return [note, *told, *self._next_call(episode, now)]

    def _again(self, episode: _Episode, why: str, now: float) -> list[Effect]:
        """Close the session because its environment is away or full. Its call waits and gets a new session later."""
        effects = self._end(episode)
        if episode.call is None:
            return effects
        if not self._may_rebuild(episode):
            return [*effects, *self._lose(episode, why, now, is_loss=False)]
        return [*effects, *self._wait(episode, now)]

    def _end(self, episode: _Episode) -> list[Effect]:
        """Begin to close the episode's session. Its slot stays taken until it is closed."""
        session = episode.session
        del self._by_session[session]
        self._closing[session] = episode.task
        episode.session, episode.state, episode.position, episode.stands_at = -1, "none", 0, b""
        return [EndSession(session=session)]
