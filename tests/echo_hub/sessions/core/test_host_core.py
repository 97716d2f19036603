"""The core of the session host: what it decides for single events, and what holds after any events."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_hub.sessions.core import host_core
from echo_hub.sessions.core.effects import Effect, EndSession, NoteSession, OpenSession, StepSession, TellCall
from echo_hub.sessions.core.host_core import HostCore
from echo_hub.sessions.turns import (
    Answer,
    Diverged,
    EpisodeEnd,
    Lost,
    NextTurn,
    PlayedTurn,
    SessionKey,
    TurnAnswer,
)
from echo_hub.tasks.environments.base import Ending

KEY = SessionKey(1, 0)
END = EpisodeEnd(ending=Ending(reward=1.0))


def reply(number: int) -> PlayedTurn:
    return PlayedTurn(completion_ids=np.array([number], dtype=np.int32))


def observed(number: int) -> NextTurn:
    return NextTurn(observation_ids=np.array([number], dtype=np.int32), turn_reward=0.0)


def played(number: int, answer: int) -> PlayedTurn:
    return replace(reply(number), observation_ids=np.array([answer], dtype=np.int32))


def core(*, most: int = 4, replay: bool = True, age_s: float = 1e9) -> HostCore:
    return HostCore({"": replay, "other": True}, most=most, age_s=age_s)


def done(effects: Sequence[Effect]) -> list[Effect]:
    return [effect for effect in effects if not isinstance(effect, NoteSession)]


def told(effects: Sequence[Effect]) -> list[tuple[int, Answer]]:
    return [(effect.call, effect.answer) for effect in effects if isinstance(effect, TellCall)]


def begin(host: HostCore, call: int, key: SessionKey, turns: Sequence[PlayedTurn], *, now: float = 0.0) -> int:
    """Begin a call for this key, report its session as opened, and return the session's number. The session has its
    first turn.
    """
    (asked,) = done(host.asked(call, key, "", turns, now))
    assert isinstance(asked, OpenSession) and asked.key == key
    (stepped,) = done(host.opened(asked.session, now))
    assert isinstance(stepped, StepSession) and len(stepped.turns) == 1
    return asked.session


def test_a_session_takes_each_turn_once() -> None:
    host = core()
    session = begin(host, 1, KEY, [reply(5)])
    assert told(host.answered(session, observed(6), 1.0)) == [(1, observed(6))]
    (again,) = host.asked(2, KEY, "", [reply(5)], 2.0)
    assert isinstance(again, TellCall) and again.answer == observed(6)
    (step,) = host.asked(3, KEY, "", [played(5, 6), reply(7)], 3.0)
    assert isinstance(step, StepSession) and len(step.turns) == 2 and step.session == session
    assert host.asked(4, KEY, "", [played(5, 6), reply(7)], 4.0) == []
    ended = host.answered(session, END, 5.0)
    assert told(ended) == [(3, END), (4, END)]
    assert EndSession(session=session) in ended
    assert told(host.asked(5, KEY, "", [played(5, 6), reply(7)], 6.0)) == [(5, END)]


def test_a_dead_session_is_rebuilt_from_the_stored_turns() -> None:
    host = core()
    first = begin(host, 1, KEY, [reply(5)])
    host.answered(first, observed(6), 0.0)
    host.asked(2, KEY, "", [played(5, 6), reply(7)], 0.0)
    end, opened = done(host.failed(first, "killed", 0.0))
    assert end == EndSession(session=first) and isinstance(opened, OpenSession)
    note, step = host.opened(opened.session, 0.0)
    assert note == NoteSession(key=KEY, what="rebuilt", detail="killed")
    assert isinstance(step, StepSession) and len(step.turns) == 1
    (step,) = host.answered(opened.session, observed(6), 0.0)
    assert isinstance(step, StepSession) and len(step.turns) == 2
    assert told(host.answered(opened.session, observed(8), 0.0)) == [(2, observed(8))]


def test_a_host_without_sessions_rebuilds_and_says_that_nothing_failed() -> None:
    host = core()
    session = begin(host, 1, KEY, [played(5, 6), played(7, 8), reply(9)])
    host.answered(session, observed(6), 0.0)
    (answer,) = told(host.answered(session, observed(0), 0.0))
    assert answer == (1, Diverged(turn=1, answer=observed(0), is_loss=False))
    (step,) = host.asked(2, KEY, "", [played(5, 6), played(7, 0), reply(3)], 0.0)
    assert isinstance(step, StepSession) and step.session == session and len(step.turns) == 3


def test_a_difference_after_a_failure_is_a_loss() -> None:
    host = core()
    first = begin(host, 1, KEY, [reply(5)])
    host.answered(first, observed(6), 0.0)
    host.asked(2, KEY, "", [played(5, 6), reply(7)], 0.0)
    _, opened = done(host.failed(first, "killed", 0.0))
    assert isinstance(opened, OpenSession)
    host.opened(opened.session, 0.0)
    effects = host.answered(opened.session, END, 0.0)
    assert told(effects) == [(2, Diverged(turn=0, answer=END, is_loss=True))]
    assert EndSession(session=opened.session) in effects


def test_a_session_that_keeps_failing_is_lost() -> None:
    host = core()
    session = begin(host, 1, KEY, [reply(5)])
    for rebuilt in range(host_core.REBUILDS):
        effects = host.failed(session, f"failure {rebuilt}", 0.0)
        assert told(effects) == []
        (session,) = [effect.session for effect in effects if isinstance(effect, OpenSession)]
        host.opened(session, 0.0)
    assert told(host.failed(session, "the last", 0.0)) == [(1, Lost(detail="the last", is_loss=True))]
    begin(host, 2, KEY, [reply(5)])


def test_a_session_that_cannot_be_rebuilt_is_lost_at_once() -> None:
    host = core(replay=False)
    session = begin(host, 1, KEY, [reply(5)])
    assert told(host.failed(session, "killed", 0.0)) == [(1, Lost(detail="killed", is_loss=True))]
    (answer,) = told(host.asked(2, SessionKey(2, 0), "", [played(5, 6), reply(7)], 0.0))
    assert isinstance(answer[1], Lost) and not answer[1].is_loss


def test_the_death_of_all_sessions_is_no_loss_of_one() -> None:
    host = core()
    session = begin(host, 1, KEY, [played(5, 6), reply(7)])
    for _ in range(host_core.REBUILDS + 1):
        effects = host.failed(session, "all died", 0.0, is_own=False)
        (session,) = [effect.session for effect in effects if isinstance(effect, OpenSession)]
        assert NoteSession(key=KEY, what="rebuilt", detail="all died") in host.opened(session, 0.0)
    answer = Diverged(turn=0, answer=observed(0), is_loss=False)
    assert told(host.answered(session, observed(0), 0.0)) == [(1, answer)]
    host = core(replay=False)
    session = begin(host, 1, KEY, [reply(5)])
    effects = host.failed(session, "all died", 0.0, is_own=False)
    assert told(effects) == [(1, Lost(detail="all died", is_loss=False))]


def test_an_opening_that_fails_costs_nothing_before_the_first_step() -> None:
    host = core(replay=False)
    (opened,) = host.asked(1, KEY, "", [reply(5)], 0.0)
    assert isinstance(opened, OpenSession)
    effects = host.failed(opened.session, "slow", 0.0)
    assert told(effects) == [] and any(isinstance(effect, OpenSession) for effect in effects)


def test_a_turn_drawn_again_begins_a_new_session() -> None:
    host = core()
    first = begin(host, 1, KEY, [reply(5)])
    host.answered(first, observed(6), 0.0)
    end, opened = done(host.asked(2, KEY, "", [reply(50)], 0.0))
    assert end == EndSession(session=first) and isinstance(opened, OpenSession) and opened.session != first


def test_sessions_wait_for_slots_and_those_that_have_begun_are_first() -> None:
    host = core(most=1)
    first = begin(host, 1, KEY, [reply(5)])
    assert host.asked(2, SessionKey(2, 0), "", [reply(1)], 0.0) == []
    assert host.asked(3, SessionKey(3, 0), "", [played(1, 2), reply(3)], 0.0) == []
    assert host.num_waiting == 2
    ended = host.answered(first, END, 0.0)
    assert EndSession(session=first) in ended and not any(isinstance(one, OpenSession) for one in ended)
    (opened,) = host.gone(first, 0.0)
    assert isinstance(opened, OpenSession) and opened.key == SessionKey(3, 0)


def test_calls_wait_while_the_environment_is_away() -> None:
    host = core()
    (opened,) = host.asked(1, KEY, "", [reply(5)], 0.0)
    assert isinstance(opened, OpenSession)
    assert host.away(opened.session, "no answer", 0.0, 0.0) == [EndSession(session=opened.session)]
    host.gone(opened.session, 0.0)
    assert (host.slots.absence, host.slots.total) == ("no answer", 4)
    host.asked(2, SessionKey(2, 0), "", [reply(5)], 0.1)
    at = host.tick_at(0.1)
    assert at is not None and at > 0.1
    (opened,) = host.tick(at)
    assert isinstance(opened, OpenSession)
    effects = host.opened(opened.session, at)
    assert host.slots.absence == ""
    step, second = done(effects)
    assert isinstance(step, StepSession) and isinstance(second, OpenSession)


def test_a_session_beyond_the_environments_slots_waits_for_one() -> None:
    host = core()
    first = begin(host, 1, KEY, [reply(5)])
    (second,) = host.asked(2, SessionKey(2, 0), "", [reply(5)], 0.0)
    assert isinstance(second, OpenSession)
    assert done(host.full(second.session, None, 0.0, 0.0)) == [EndSession(session=second.session)]
    assert host.gone(second.session, 0.0) == []
    host.answered(first, observed(6), 0.0)
    assert host.tick(1.0) == []
    (end,) = [effect for effect in host.closed(KEY, 2.0) if isinstance(effect, EndSession)]
    (opened,) = host.gone(end.session, 3.0)
    assert isinstance(opened, OpenSession) and opened.key == SessionKey(2, 0)


def test_a_refused_episode_ends() -> None:
    host = core()
    session = begin(host, 1, KEY, [reply(5)])
    effects = host.refused(session, "a branch", 0.0)
    assert told(effects) == [(1, EpisodeEnd(ending=None, refusal="a branch"))]
    assert EndSession(session=session) in effects


def test_old_idle_sessions_are_closed_and_rebuilt_when_asked() -> None:
    host = core(age_s=10.0)
    session = begin(host, 1, KEY, [reply(5)])
    host.answered(session, observed(6), 1.0)
    assert host.tick_at(1.0) == 10.0
    assert done(host.tick(10.0)) == [EndSession(session=session)]
    (opened,) = host.asked(2, KEY, "", [played(5, 6), reply(7)], 11.0)
    assert isinstance(opened, OpenSession)


def test_a_closed_episode_answers_its_calls_and_a_new_attempt_closes_the_old_one() -> None:
    host = core()
    session = begin(host, 1, KEY, [reply(5)])
    closed = host.closed(KEY, 0.0)
    assert EndSession(session=session) in closed
    assert told(closed) == [(1, Lost(detail="The session was closed.", is_loss=False))]
    assert host.answered(session, observed(6), 0.0) == []
    second = begin(host, 2, KEY, [reply(5)])
    effects = host.asked(3, replace(KEY, attempt=1), "", [reply(5)], 0.0)
    assert EndSession(session=second) in effects and any(isinstance(one, OpenSession) for one in effects)
    (late,) = told(host.asked(4, KEY, "", [reply(5)], 0.0))
    assert late[0] == 4 and isinstance(late[1], Lost)


def test_an_abandoned_call_leaves_its_session_for_the_next() -> None:
    host = core(most=1)
    session = begin(host, 1, KEY, [reply(5)])
    assert host.abandoned(1, 0.0) == []
    assert told(host.answered(session, observed(6), 0.0)) == []
    assert told(host.asked(2, KEY, "", [reply(5)], 0.0)) == [(2, observed(6))]
    assert host.asked(3, SessionKey(2, 0), "", [reply(5)], 0.0) == []
    assert host.abandoned(3, 0.0) == [] and host.num_waiting == 0


class World:
    """Stand-in for the session host: carries out the core's effects with a deterministic environment, and checks the
    core's invariants.
    """

    def __init__(self, most: int) -> None:
        self.host = HostCore({"": True}, most=most, age_s=50.0)
        self.most = most
        self.now = 0.0
        self.open: dict[int, list[PlayedTurn]] = {}
        """Turns that each open session has taken."""
        self.pending: dict[int, Effect] = {}
        """For each session: the effect that it is working on."""
        self.closing: set[int] = set()
        self.asked: dict[int, Sequence[PlayedTurn]] = {}
        self.answers: dict[int, Answer] = {}
        self.stored: dict[SessionKey, list[PlayedTurn]] = {}

    def answer(self, turns: Sequence[PlayedTurn]) -> TurnAnswer:
        said = b"".join(turn.completion_ids.tobytes() for turn in turns)
        digest = hashlib.blake2b(said, digest_size=4).digest()
        return END if len(turns) > 4 or digest[0] < 20 else observed(int.from_bytes(digest[1:3]))

    def ask(self, key: SessionKey, turns: Sequence[PlayedTurn]) -> None:
        call = len(self.asked)
        self.asked[call] = turns
        self.do(self.host.asked(call, key, "", turns, self.now))

    def do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, OpenSession):
                assert effect.session not in self.open
                self.open[effect.session] = []
                self.pending[effect.session] = effect
                assert len(self.open) + len(self.closing) <= self.most
            elif isinstance(effect, StepSession):
                assert effect.session in self.open and effect.session not in self.pending
                taken = self.open[effect.session]
                assert len(effect.turns) == len(taken) + 1
                for before, turn in zip(taken, effect.turns, strict=False):
                    assert np.array_equal(before.completion_ids, turn.completion_ids)
                taken.append(effect.turns[-1])
                self.pending[effect.session] = effect
            elif isinstance(effect, EndSession):
                del self.open[effect.session]
                self.pending.pop(effect.session, None)
                self.closing.add(effect.session)
            elif isinstance(effect, TellCall):
                assert effect.call not in self.answers
                self.answers[effect.call] = effect.answer

    def finish(self, session: int) -> None:
        effect = self.pending.pop(session)
        if isinstance(effect, OpenSession):
            self.do(self.host.opened(session, self.now))
        else:
            assert isinstance(effect, StepSession)
            self.do(self.host.answered(session, self.answer(effect.turns), self.now))

    def close_one(self, session: int) -> None:
        self.closing.remove(session)
        self.do(self.host.gone(session, self.now))

    def drain(self) -> None:
        """Let all work in progress succeed, until nothing is left."""
        for _ in range(10_000):
            if self.pending:
                self.finish(min(self.pending))
            elif self.closing:
                self.close_one(min(self.closing))
            elif self.host.num_waiting and (at := self.host.tick_at(self.now)) is not None:
                self.now = max(self.now, at)
                self.do(self.host.tick(self.now))
            else:
                return
        raise AssertionError("it never ends")


OPERATIONS = ("ask", "repeat", "change", "finish", "finish", "fail", "away", "full", "close_one", "close", "tick")


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3), st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 2**16)), max_size=60))
def test_any_events_leave_each_call_with_the_true_answer(most: int, events: list[tuple[str, int]]) -> None:
    world = World(most)
    for operation, number in events:
        key = SessionKey(number % 3, number % 2)
        turns = world.stored.setdefault(key, [])
        busy = sorted(world.pending)
        session = busy[number % len(busy)] if busy else -1
        if operation in ("ask", "change"):
            if operation == "change" and turns:  # A turn was dropped, and is drawn again.
                turns.pop()
            asked = [*turns, reply(number)]
            world.ask(key, asked)
            answer = world.answer(asked)
            if isinstance(answer, NextTurn):
                turns.append(replace(asked[-1], observation_ids=answer.observation_ids))
            else:
                turns.clear()
        elif operation == "repeat" and world.asked:
            call = number % len(world.asked)
            world.ask(SessionKey(9, call), world.asked[call])
        elif operation == "finish" and busy:
            world.finish(session)
        elif operation == "fail" and busy:
            world.do(world.host.failed(session, "killed", world.now))
        elif operation == "away" and busy:
            world.do(world.host.away(session, "away", world.now, 0.5))
        elif operation == "full" and busy:
            world.do(world.host.full(session, None, world.now, 0.5))
        elif operation == "close_one" and world.closing:
            world.close_one(min(world.closing))
        elif operation == "close":
            world.do(world.host.closed(key, world.now))
            turns.clear()
        elif operation == "tick":
            world.now += number % 100
            world.do(world.host.tick(world.now))
    world.drain()
    assert world.answers.keys() == world.asked.keys()
    for call, told in world.answers.items():
        assert isinstance(told, Lost) or told == world.answer(world.asked[call])
        if isinstance(told, Lost) and told.is_loss:
            assert told.detail == "killed"
