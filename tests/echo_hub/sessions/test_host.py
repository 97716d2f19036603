"""The session host with real sessions: on the test's event loop, and in processes that are killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import psutil
import pytest

from echo_hub.config.sections import HubConfig
from echo_hub.config.sessions_section import SessionsConfig
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.sessions import host as host_module
from echo_hub.sessions.core.waiting import FIRST_TRY_S
from echo_hub.sessions.host import SessionHost
from echo_hub.sessions.process import ProcessEnvironment
from echo_hub.sessions.turn_codec import SessionTask, TurnCodec
from echo_hub.sessions.turns import Answer, Diverged, EpisodeEnd, Lost, NextTurn, PlayedTurn, SessionKey
from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import (
    Ending,
    Environment,
    EnvironmentAway,
    Message,
    NoSlot,
    Observation,
    Opening,
    Reply,
    Response,
    Session,
)
from tests.echo_hub.sessions.conftest import wait_until_dead

KEY = SessionKey(7, 0)


@cache
def codec() -> PromptCodec:
    return PromptCodec.of_run(HubConfig(), resolve_base("builtin:small"))


def turn(text: str) -> PlayedTurn:
    ids = [*codec().ids_of_plain(text), codec().stop_ids[0]]
    return PlayedTurn(completion_ids=np.array(ids, dtype=np.int32))


class Echo:
    """An environment that answers with the turn's number and the reply, and counts its sessions and their steps."""

    name = "echo"
    max_turns = 4

    def __init__(self) -> None:
        self.open_sessions = 0
        self.most_open = 0
        self.steps: list[str] = []
        self.slots = 1000
        self.away = ""
        self.opens = asyncio.Event()
        self.opens.set()
        self.hangs = False

    def sample(self, seed: int) -> Problem:
        return Problem(prompt="go")

    async def open(self, problem: Problem, seed: int) -> Session:
        await self.opens.wait()
        if self.away:
            raise EnvironmentAway(self.away)
        if self.open_sessions == self.slots:
            raise NoSlot("all taken")
        self.open_sessions += 1
        self.most_open = max(self.most_open, self.open_sessions)
        return EchoSession(self)


class EchoSession:
    def __init__(self, environment: Echo) -> None:
        self._environment = environment
        self._turns = 0

    async def reset(self) -> Opening:
        return Opening(text="go")

    async def step(self, reply: Reply) -> Response:
        self._turns += 1
        self._environment.steps.append(reply.text)
        await asyncio.sleep(1000.0 if self._environment.hangs else 0.001)
        if reply.text == "end":
            return Ending(reward=1.0)
        if reply.text == "ids":
            return Observation(text="", ids=(5, 6, 7))
        if reply.text == "strange ids":
            return Observation(text="", ids=(10**7,))
        if reply.text == "much":
            return Observation(text=" x" * 15_000)
        if reply.text == "too much":
            return Observation(text="x y" * 5_000_000)
        if reply.text == "too many":
            return Observation(text="a", more=(Message(text="b"),) * 500_000)
        return Observation(text=f"{self._turns} {reply.text}", turn_reward=0.25)

    async def score(self) -> Ending:
        return Ending(reward=0.5)

    async def close(self) -> None:
        self._environment.open_sessions -= 1


@asynccontextmanager
async def hosted(environment: Environment, **settings: float) -> AsyncIterator[SessionHost]:
    task = SessionTask(environment=environment, codec=TurnCodec(codec(), max_tokens=8))
    async with SessionHost.open({"": task}, SessionsConfig.model_validate(settings)) as host:
        yield host


async def asked(host: SessionHost, key: SessionKey, turns: Sequence[PlayedTurn], *, seed: int = 3) -> Answer:
    problem = Problem(prompt="go") if seed == 3 else Problem(prompt="roll", metadata={"seed": seed})
    return await host.respond(key, "", problem=problem, seed=0, turns=turns)


async def played(host: SessionHost, key: SessionKey, *texts: str, seed: int = 3) -> tuple[list[PlayedTurn], Answer]:
    """Play until the answer is no next turn, and return the answered turns with the last answer."""
    turns: list[PlayedTurn] = []
    answer: Answer = Lost(detail="nothing said", is_loss=False)
    for text in texts:
        answer = await asked(host, key, [*turns, turn(text)], seed=seed)
        if not isinstance(answer, NextTurn):
            break
        turns.append(replace(turn(text), observation_ids=answer.observation_ids))
    return turns, answer


async def test_an_episode_has_one_session_and_the_answers_of_the_codec() -> None:
    environment = Echo()
    async with hosted(environment) as host:
        turns, answer = await played(host, KEY, "a", "b", "end")
        assert answer == EpisodeEnd(ending=Ending(reward=1.0))
        expected = codec().encode_answer([{"role": "user", "content": "1 a"}], after=codec().stop_ids[0])
        assert turns[0].observation_ids.tolist() == expected.tolist()
        assert environment.steps == ["a", "b", "end"] and environment.most_open == 1
    assert environment.open_sessions == 0


async def test_ids_of_an_environment_are_taken_as_they_are() -> None:
    async with hosted(Echo()) as host:
        answer = await asked(host, KEY, [turn("ids")])
        assert isinstance(answer, NextTurn) and answer.observation_ids.tolist() == [5, 6, 7]
        answer = await asked(host, SessionKey(8, 0), [turn("strange ids")])
        assert isinstance(answer, Lost) and "does not have" in answer.detail and answer.is_loss


@pytest.mark.parametrize("texts", [("a", "b", "c", "d"), ("much",), ("too much",), ("too many",)])
async def test_an_episode_without_room_for_a_turn_is_scored(
    texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "SOON_CHARACTERS", 1_000)
    async with hosted(Echo(), step_timeout_s=2.0) as host:
        _, answer = await played(host, KEY, *texts)
        assert answer == EpisodeEnd(ending=Ending(reward=0.5))


async def test_no_turn_is_stepped_twice_by_repeated_calls() -> None:
    environment = Echo()
    async with hosted(environment) as host:
        answers = await asyncio.gather(*(asked(host, KEY, [turn("a")]) for _ in range(5)))
        assert len({tuple(one.observation_ids.tolist()) for one in answers if isinstance(one, NextTurn)}) == 1
        assert environment.steps == ["a"]


async def test_a_new_host_rebuilds_from_the_turns() -> None:
    environment = Echo()
    async with hosted(environment) as host:
        turns, _ = await played(host, KEY, "a", "b")
    async with hosted(environment) as host:
        answer = await asked(host, KEY, [*turns, turn("c")])
        assert isinstance(answer, NextTurn)
        assert environment.steps == ["a", "b", "a", "b", "c"]
        (note,) = host.history(7)
        assert (note.kind, note.index, note.attempt) == ("rebuilt", 0, 0)


async def test_another_answer_in_a_rebuilt_session_is_told_with_its_turn() -> None:
    async with hosted(Echo()) as host:
        turns, _ = await played(host, KEY, "a", "b")
    changed = [turns[0], replace(turns[1], observation_ids=turns[0].observation_ids)]
    async with hosted(Echo()) as host:
        answer = await asked(host, KEY, [*changed, turn("c")])
        assert isinstance(answer, Diverged) and answer.turn == 1 and not answer.is_loss
        assert isinstance(answer.answer, NextTurn)
        assert answer.answer.observation_ids.tolist() == turns[1].observation_ids.tolist()
        assert isinstance(await asked(host, KEY, [*turns, turn("c")]), NextTurn)


async def test_calls_wait_for_a_slot_and_all_are_answered() -> None:
    environment = Echo()
    async with hosted(environment, most=2) as host:
        every = await asyncio.gather(*(played(host, SessionKey(1, index), "a", "end") for index in range(8)))
        assert all(answer == EpisodeEnd(ending=Ending(reward=1.0)) for _, answer in every)
        assert environment.most_open == 2
        assert host.slots == 2 and host.num_waiting == 0


async def test_an_environment_with_one_slot_serves_a_whole_group() -> None:
    environment = Echo()
    environment.slots = 1
    async with hosted(environment) as host:
        every = await asyncio.gather(*(played(host, SessionKey(1, index), "a", "end") for index in range(4)))
        assert all(answer == EpisodeEnd(ending=Ending(reward=1.0)) for _, answer in every)
        assert environment.most_open == 1 and host.slots == 1


async def test_calls_wait_until_the_environment_is_back() -> None:
    environment = Echo()
    environment.away = "the server does not answer"
    async with hosted(environment) as host:
        call = asyncio.create_task(asked(host, KEY, [turn("a")]))
        async with asyncio.timeout(5.0):
            assert await host.slots_changed(host.slots) == 0
        assert host.absence == "the server does not answer" and host.away_since is not None
        environment.away = ""
        async with asyncio.timeout(FIRST_TRY_S + 5.0):
            assert isinstance(await call, NextTurn)
        assert host.absence == "" and host.slots == SessionsConfig().most and host.away_since is None


async def test_an_environment_that_starts_slowly_loses_no_episode() -> None:
    environment = Echo()
    environment.opens.clear()
    async with hosted(environment, open_timeout_s=0.02) as host:
        call = asyncio.create_task(asked(host, KEY, [turn("a")]))
        async with asyncio.timeout(5.0):
            assert await host.slots_changed(host.slots) == 0
        assert host.absence == "No session opens within sessions.open_timeout_s = 0.02 s."
        environment.opens.set()
        async with asyncio.timeout(FIRST_TRY_S + 5.0):
            assert isinstance(await call, NextTurn)


async def test_a_step_that_takes_too_long_loses_its_session() -> None:
    environment = Echo()
    environment.hangs = True
    async with hosted(environment, step_timeout_s=0.02) as host:
        answer = await asked(host, KEY, [turn("a")])
        assert answer == Lost(detail="The session took longer than sessions.step_timeout_s = 0.02 s.", is_loss=True)
        assert [note.kind for note in host.history(7)] == ["opened", "rebuilt", "rebuilt", "lost"]
    assert environment.open_sessions == 0


async def test_a_session_that_begins_otherwise_than_its_problem_is_lost() -> None:
    async with hosted(Echo()) as host:
        answer = await host.respond(KEY, "", problem=Problem(prompt="stop"), seed=0, turns=[turn("a")])
        assert isinstance(answer, Lost) and "another prompt" in answer.detail


async def test_a_cancelled_call_leaves_the_host_usable() -> None:
    environment = Echo()
    async with hosted(environment, most=1) as host:
        call = asyncio.create_task(asked(host, KEY, [turn("a")]))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        host.close(KEY)
        assert isinstance(await asked(host, SessionKey(8, 0), [turn("b")]), NextTurn)
    assert environment.open_sessions == 0


def kill_all(dice: ProcessEnvironment) -> None:
    """Kill the process that forks sessions, and with it all sessions."""
    assert dice.process.pid is not None
    server = psutil.Process(dice.process.pid)
    processes = [server, *server.children()]
    server.kill()
    wait_until_dead(processes)  # Until then, a session may answer several turns.


async def test_killed_sessions_and_servers_cost_no_turn(dice: ProcessEnvironment) -> None:
    async with hosted(dice) as host:
        whole, _ = await played(host, KEY, *["roll"] * 5, seed=5)
        turns: list[PlayedTurn] = []
        for number in range(5):
            if number in (1, 3):
                kill_all(dice)
            answer = await asked(host, SessionKey(8, 0), [*turns, turn("roll")], seed=5)
            assert isinstance(answer, NextTurn)
            turns.append(replace(turn("roll"), observation_ids=answer.observation_ids))
        expected = [one.observation_ids.tolist() for one in whole]
        assert [one.observation_ids.tolist() for one in turns] == expected


async def test_a_killed_server_counts_no_loss_although_chance_answers_otherwise(dice: ProcessEnvironment) -> None:
    async with hosted(dice) as host:
        turns, _ = await played(host, KEY, "chance", seed=5)
        kill_all(dice)
        answer = await asked(host, KEY, [*turns, turn("roll")], seed=5)
        assert isinstance(answer, Diverged) and not answer.is_loss


async def test_a_reply_that_kills_its_session_loses_it_each_time(dice: ProcessEnvironment) -> None:
    async with hosted(dice) as host:
        for attempt in range(2):
            _, answer = await played(host, SessionKey(9, 0, attempt), "roll", "die", seed=6)
            assert answer == Lost(detail="The session's process was ended by signal 9 (SIGKILL).", is_loss=True)
