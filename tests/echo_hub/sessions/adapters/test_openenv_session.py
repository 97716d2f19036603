"""Episodes at a server in the test's process, whose answers the test sets. `test_openenv_environment` uses real
servers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from echo_hub.sessions.adapters.openenv_options import OpenEnvOptions
from echo_hub.sessions.adapters.openenv_session import OpenEnvSession, RunningReward
from echo_hub.sessions.adapters.openenv_socket import OpenEnvSocket
from echo_hub.tasks.environments.base import Ending, Message, Observation, Reply, SessionGone
from tests.echo_hub.sessions.adapters.test_openenv_socket import STATE, answering, error, server


def observed(text: str = "", *, reward: float | None = 0.0, done: bool = False, **more: Any) -> str:
    data = {"observation": {"text": text, **more}, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


async def played(replies: list[str], *answers: str, **options: Any) -> AsyncIterator[Any]:
    """Yield the opening of a session at a server that gives these `answers`, then the answer to each reply."""
    read = OpenEnvOptions.model_validate({"observation": "text", "action": "say", "answer_s": 5, **options})
    async with server(answering(STATE, *answers)) as url:
        session = OpenEnvSession(await OpenEnvSocket.open(url, read), read, seed=7)
        try:
            yield await session.reset()
            for reply in replies:
                yield await session.step(Reply(text=reply))
            yield await session.score()
        finally:
            await session.close()


async def test_each_turn_earns_its_steps_reward() -> None:
    answers = [
        observed("go"),
        observed("one", reward=0.25),
        observed("two", reward=None),
        observed(reward=0.5, done=True),
    ]
    opening, one, two, end, _ = [said async for said in played(["a", "b", "c"], *answers, prompt="Play: {observation}")]
    assert opening.text == "Play: go"
    assert one == Observation(text="one", turn_reward=0.25, reward_if_cut=0.25)
    assert two == Observation(text="two", turn_reward=0.0, reward_if_cut=0.25)
    assert end == Ending(reward=0.75, components={"unclipped": 0.75})


async def test_the_sum_is_clipped_and_turns_add_up_to_it() -> None:
    answers = [observed(), *(observed("on", reward=0.75) for _ in range(3))]
    _, one, two, three, end = [said async for said in played(["a", "b", "c"], *answers)]
    assert [one.turn_reward, two.turn_reward, three.turn_reward] == [0.75, 0.25, 0.0]
    assert end == Ending(reward=1.0, components={"unclipped": 2.25})


def test_rewards_beyond_all_bounds_are_clipped() -> None:
    running = RunningReward((-1.0, 1.0))
    running.sum = -1e300
    assert running.ending() == Ending(reward=-1.0, components={"unclipped": -1e6})


def test_a_turn_never_earns_more_than_the_distance_of_the_bounds() -> None:
    running = RunningReward((2.0, 3.0))
    assert running.end_turn() == 0.0
    running.sum = 7.0
    assert running.end_turn() == 1.0
    assert running.ending().reward == 3.0


async def test_the_episode_ends_after_its_turns() -> None:
    answers = [observed(), observed("one", reward=0.25), observed("two", reward=0.25)]
    _, one, two, _ = [said async for said in played(["a", "b"], *answers, turns=2)]
    assert isinstance(one, Observation)
    assert two == Ending(reward=0.5, components={"unclipped": 0.5})


async def test_a_refused_action_is_told_to_the_model() -> None:
    wrong = error("VALIDATION_ERROR", errors=[{"loc": ["say"], "msg": "too long"}])
    _, told, end = [said async for said in played(["a"], observed(), wrong, mistake_reward=-0.5, reward_bounds=(-1, 1))]
    assert told == Observation(text="Error: no; say: too long", turn_reward=-0.5, reward_if_cut=-0.5)
    assert end.reward == -0.5


async def test_a_refused_action_ends_the_episode_if_the_run_says_so() -> None:
    _, end, _ = [said async for said in played(["a"], observed(), error("VALIDATION_ERROR"), on_mistake="end")]
    assert end == Ending(reward=0.0, components={"unclipped": 0.0})


async def test_a_reply_without_an_action_never_reaches_the_server() -> None:
    _, told, good, _ = [
        said
        async for said in played(["nonsense", '{"say": "hi"}'], observed(), observed("one"), action="", form="json")
    ]
    assert told.text.startswith("Error: The answer is not JSON")
    assert good.text == "one"


async def test_the_servers_own_error_loses_the_session() -> None:
    with pytest.raises(SessionGone, match="failed in a step") as raised:
        [said async for said in played(["a"], observed(), error("EXECUTION_ERROR"))]
    assert raised.value.got == "EXECUTION_ERROR: no"


async def test_a_code_can_be_declared_the_models_mistake() -> None:
    answers = [observed(), error("EXECUTION_ERROR")]
    _, told, _ = [said async for said in played(["a"], *answers, mistakes=["VALIDATION_ERROR", "EXECUTION_ERROR"])]
    assert told.text == "Error: no"


async def test_a_missing_field_loses_the_session_unless_the_episode_ends() -> None:
    with pytest.raises(SessionGone, match="cannot be used") as raised:
        [said async for said in played(["a"], observed(), observed("one"), observation="txt", prompt="Play.")]
    assert "its fields: text" in (raised.value.got or "")
    answers = [observed(), observed(done=True, reward=1)]
    _, end, _ = [said async for said in played(["a"], *answers, observation="txt", prompt="Play.")]
    assert end.reward == 1.0


async def test_an_episode_that_is_over_after_its_reset_is_lost() -> None:
    with pytest.raises(SessionGone, match="over after its reset"):
        [said async for said in played([], observed(done=True))]


CALLS = '<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b"}</tool_call>'


def of_tool(text: str, *, reward: float = 0.0, done: bool = False) -> str:
    data = {"observation": {"tool_name": "a", "result": text, "error": None}, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


async def test_tool_calls_are_answered_in_their_order() -> None:
    answers = [observed("go"), of_tool("one", reward=0.25), of_tool("two", reward=0.25)]
    _, told, last, _ = [
        said
        async for said in played([CALLS, "It is 2."], *answers, action="", form="tools", prompt="Play.", observation="")
    ]
    assert told == Observation(
        text="one",
        role="tool",
        name="a",
        tool_call_id="call00000",
        more=(Message(text="two", role="tool", name="b", tool_call_id="call00001"),),
        turn_reward=0.5,
        reward_if_cut=0.5,
    )
    assert last == Ending(reward=0.5, components={"unclipped": 0.5})


async def test_no_call_is_sent_after_the_episodes_end() -> None:
    # The server has no answer for a second call. If a second call came, the test would exceed its time limit.
    answers = [observed("go"), of_tool("one", reward=1.0, done=True)]
    _, end, _ = [
        said
        async for said in played([CALLS], *answers, action="", form="tools", prompt="Play.", observation="", answer_s=1)
    ]
    assert end.reward == 1.0
