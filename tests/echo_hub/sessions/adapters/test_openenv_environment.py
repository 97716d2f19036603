"""Episodes at real OpenEnv servers: as `openenv init` writes one, and two that hide a number (`openenv_worlds`)."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echo_hub.sessions.adapters.openenv_environment import OpenEnvEnvironment
from echo_hub.sessions.adapters.openenv_options import OpenEnvOptions, ServerPlace
from echo_hub.sessions.kinds import SessionPlace, make_any_task
from echo_hub.sessions.process import ProcessEnvironment
from echo_hub.tasks.environments.base import Ending, EnvironmentAway, NoSlot, Observation, Reply, Response, SessionGone
from echo_shared.errors import ConfigError
from tests.openenv_servers import DIE, FAIL, HUGE, NAN, STALL, OpenEnvServer, initialised

GUESS = {"action": "number", "observation": "text", "reward_bounds": [-2, 1], "turns": 12}


@pytest.fixture(scope="module")
def guessing() -> Iterator[OpenEnvServer]:
    with OpenEnvServer("guessing:app") as server:
        yield server


def environment(server: OpenEnvServer, **options: Any) -> OpenEnvEnvironment:
    return OpenEnvEnvironment(ServerPlace.of(server.url), OpenEnvOptions.read(server.task, options), None)


async def said(session: Any, number: int) -> Response:
    answer: Response = await session.step(Reply(text=str(number)))
    return answer


async def test_the_environment_as_shipped_is_played(tmp_path: Path) -> None:
    with OpenEnvServer("server.app:app", initialised(tmp_path)) as server:
        env = environment(server, action="message", observation="echoed_message", turns=4)
        problem = await env.sample(2**64 - 1)
        session = await env.open(problem, 0)
        # The server's only slot is taken, but asking for a prompt needs no slot.
        assert (await env.sample(1)).prompt == problem.prompt == "My Env environment ready!"
        with pytest.raises(NoSlot) as full:
            await env.open(problem, 0)
        assert full.value.most == 1
        assert (await session.reset()).text == problem.prompt
        turns = [await session.step(Reply(text="hello")) for _ in range(3)]
        assert turns == [
            Observation(text="hello", turn_reward=0.5, reward_if_cut=0.5),
            Observation(text="hello", turn_reward=0.5, reward_if_cut=1.0),
            Observation(text="hello", turn_reward=0.0, reward_if_cut=1.0),
        ]
        assert await session.step(Reply(text="hello")) == Ending(reward=1.0, components={"unclipped": 2.0})
        assert (await session.state()).step_count == 4
        await session.close()
        async with asyncio.timeout(5):
            await (await _opened(env, problem)).close()


async def _opened(env: OpenEnvEnvironment, problem: Any) -> Any:
    """Open a session. Wait, because the server needs a moment to end the previous session."""
    while True:
        try:
            return await env.open(problem, 0)
        except NoSlot:
            await asyncio.sleep(0.02)


async def test_the_seed_decides_the_hidden_state(guessing: OpenEnvServer) -> None:
    env = environment(guessing, **GUESS, reset={"top": 50})

    async def transcript(seed: int) -> list[Response]:
        problem = await env.sample(seed)
        assert problem.prompt == "A number from 1 to 50."
        session = await env.open(problem, 0)
        await session.reset()
        low, high, answers = 1, 50, list[Response]()
        while not answers or isinstance(answers[-1], Observation):
            guess = (low + high) // 2
            answers.append(await said(session, guess))
            if isinstance(answers[-1], Observation):
                low, high = (guess + 1, high) if answers[-1].text == "higher" else (low, guess - 1)
        await session.close()
        return answers

    found = await asyncio.gather(*map(transcript, (1, 2, 3, 1)))
    assert found[0] == found[3]
    assert len({str(one) for one in found}) == 3
    ending = found[0][-1]
    assert isinstance(ending, Ending)
    assert ending.reward == 1.0 - 0.25 * (len(found[0]) - 1)


async def test_the_models_mistake_costs_no_session(guessing: OpenEnvServer) -> None:
    env = environment(guessing, **GUESS)
    session = await env.open(await env.sample(1), 0)
    await session.reset()
    for wrong in ("a lot", "5000"):
        told = await session.step(Reply(text=wrong))
        assert isinstance(told, Observation)
        assert told.text.startswith("Error: Invalid message; number: Input should be")
    assert (await session.state()).step_count == 0
    assert isinstance(await said(session, 1), Observation)
    await session.close()


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (FAIL, "EXECUTION_ERROR: the dice fell off the table"),
        (STALL, "nothing within 1 s"),
        (HUGE, "larger than task.options.largest_kb = 512"),
    ],
)
async def test_the_servers_fault_loses_the_session(guessing: OpenEnvServer, number: int, told: str) -> None:
    env = environment(guessing, **GUESS, answer_s=1, largest_kb=512)
    session = await env.open(await env.sample(1), 0)
    await session.reset()
    with pytest.raises(SessionGone) as raised:
        await said(session, number)
    assert told in (raised.value.got or "")
    await session.close()


async def test_servers_send_nan_as_null_so_it_earns_nothing(guessing: OpenEnvServer) -> None:
    env = environment(guessing, **GUESS)
    session = await env.open(await env.sample(1), 0)
    await session.reset()
    assert await said(session, NAN) == Observation(text="?")
    await session.close()


async def test_a_server_that_dies_in_mid_step_is_away_until_it_is_back() -> None:
    with OpenEnvServer("guessing:app") as server:
        env = environment(server, **GUESS)
        problem = await env.sample(1)
        session = await env.open(problem, 0)
        await session.reset()
        before = await said(session, 50)
        with pytest.raises(SessionGone) as raised:
            await said(session, DIE)
        assert "without a goodbye" in (raised.value.got or "")
        await session.close()
        with pytest.raises(EnvironmentAway):
            await env.open(problem, 0)
        with pytest.raises(EnvironmentAway):
            await env.sample(1)
        await asyncio.to_thread(server.start)
        again = await env.open(problem, 0)
        assert (await again.reset()).text == problem.prompt
        assert await said(again, 50) == before
        assert (await again.state()).step_count == 1
        await again.close()


async def test_tools_are_called() -> None:
    with OpenEnvServer("guessing:tools") as server:
        with pytest.raises(ConfigError) as raised:
            await environment(server, form="tools").sample(1)
        tools = tomllib.loads((raised.value.do or "").partition(": ")[2])["tools"]
        assert tools[0]["parameters"]["required"] == ["number"]
        env = environment(server, form="tools", prompt="Find the number.", tools=tools)
        session = await env.open(await env.sample(1), 0)
        assert (await session.reset()).text == "Find the number."
        calls = [f'<tool_call>{{"name": "guess", "arguments": {{"number": {n}}}}}</tool_call>' for n in range(1, 101)]
        low = await session.step(Reply(text=calls[0]))
        assert isinstance(low, Observation)
        assert (low.text, low.role, low.name) == ("higher", "tool", "guess")
        wrong = '<tool_call>{"name": "gues", "arguments": {}}</tool_call><tool_call>{"name": "guess"}</tool_call>'
        told = await session.step(Reply(text=wrong))
        assert isinstance(told, Observation)
        assert told.text.startswith("Error: ")
        assert told.more[0].text.startswith("Error: ")
        for start in range(0, 100, 10):
            answer = await session.step(Reply(text="".join(calls[start : start + 10])))
            assert isinstance(answer, Observation)
        assert await session.step(Reply(text="Found it.")) == Ending(reward=1.0, components={"unclipped": 1.0})
        await session.close()


async def test_a_private_server_gets_its_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KEY", "key-of-the-game")
    monkeypatch.setenv("GAME_KEY", "Bearer key-of-the-game")
    with OpenEnvServer("guessing:private") as server:
        options = {"action": "text", "observation": "text", "authorization_env": "GAME_KEY"}
        env = make_any_task(server.task, options, SessionPlace(run_dir=tmp_path))
        assert isinstance(env, ProcessEnvironment)
        problem = await asyncio.to_thread(env.sample, 1)
        session = await env.open(problem, 0)
        assert (await session.reset()).text == problem.prompt
        await session.close()
        env.stop()
        monkeypatch.setenv("GAME_KEY", "Bearer a-wrong-key")
        env = make_any_task(server.task, options, SessionPlace())
        assert isinstance(env, ProcessEnvironment)
        with pytest.raises(ConfigError, match=r"refuses the hub") as refused:
            await asyncio.to_thread(env.sample, 1)
        session = await env.open(problem, 0)
        with pytest.raises(ConfigError, match=r"refuses the hub"):
            await session.reset()
        await session.close()
        env.stop()
    assert "a wrong key: ****" in str(refused.value) and "a-wrong-key" not in str(refused.value)
    assert len(written := _contents(tmp_path)) > 0 and b"key-of-the-game" not in written


def _contents(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())
