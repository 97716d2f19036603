"""OpenEnv servers of tests, made with openenv's own SDK: `uvicorn guessing:app`, `guessing:tools`, `guessing:words`.

The first two hide a number that the seed determines. Some guesses make the server fail as real ones do. The third
answers with digits that depend on the seed and on all words so far.
"""

from __future__ import annotations

import os
import random
import time
import zlib
from typing import Any
from uuid import uuid4

from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    CallToolAction,
    CallToolObservation,
    Environment,
    MCPEnvironment,
    Observation,
    State,
    create_fastapi_app,
)
from pydantic import Field

SLOTS = int(os.environ.get("SLOTS", "64"))
FAIL, STALL, NAN, HUGE, DIE = -1, -2, -3, -4, -5


class Guess(Action):
    number: int = Field(..., le=1000)


class Hint(Observation):
    text: str = ""
    details: dict[str, Any] = Field(default_factory=dict)


class Guessing(Environment):  # type: ignore[type-arg]
    """Higher or lower. A hit earns 1 and ends the episode, a wrong guess costs 0.25."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id=str(uuid4()), step_count=0)
        self._hidden = 0

    def reset(self, seed: int | None = None, top: int = 100, **_: Any) -> Hint:
        self._state = State(episode_id=str(uuid4()), step_count=0)
        self._hidden = random.Random(seed).randint(1, top)
        return Hint(text=f"A number from 1 to {top}.", reward=0.0)

    def step(self, action: Guess, **_: Any) -> Hint:  # type: ignore[override]
        self._state.step_count += 1
        number = action.number
        if number == FAIL:
            raise RuntimeError("the dice fell off the table")
        if number == STALL:
            time.sleep(3)
        if number == DIE:
            os._exit(7)
        if number == NAN:
            return Hint(text="?", reward=float("nan"))
        if number == HUGE:
            return Hint(text="x" * 2_000_000, reward=0.0)
        if number == self._hidden:
            return Hint(text="yes", reward=1.0, done=True)
        return Hint(text="higher" if number < self._hidden else "lower", reward=-0.25, details={"tried": number})

    @property
    def state(self) -> State:
        return self._state


class Words(Action):
    text: str = Field(..., max_length=10_000)


class Remembering(Environment):  # type: ignore[type-arg]
    """Earns the last digit of its answer, in tenths. The episode ends with the fourth turn."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id=str(uuid4()), step_count=0)
        self._heard = 0
        self._pause_s = 0.0

    def reset(self, seed: int | None = None, pause_s: float = 0.0, **_: Any) -> Hint:
        self._state = State(episode_id=str(uuid4()), step_count=0)
        self._pause_s = pause_s
        self._heard = zlib.crc32(str(seed).encode())
        return Hint(text=f"{self._heard % 100}+", reward=0.0)

    def step(self, action: Words, **_: Any) -> Hint:  # type: ignore[override]
        self._state.step_count += 1
        time.sleep(self._pause_s)
        self._heard = zlib.crc32(action.text.encode(), self._heard)
        return Hint(text=f"{self._heard % 100}+", reward=self._heard % 10 / 10, done=self._state.step_count == 4)

    @property
    def state(self) -> State:
        return self._state


class ToolGuessing(MCPEnvironment):
    """The same game, played by tool calls. It never sends `done`: a reply without a tool call ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("guessing")
        self._hidden = 0
        self._state = State(episode_id=str(uuid4()), step_count=0)

        @server.tool
        def guess(number: int) -> str:
            """Compare a number with the hidden one."""
            return "yes" if number == self._hidden else "higher" if number < self._hidden else "lower"

        super().__init__(server)

    def reset(self, seed: int | None = None, **_: Any) -> Observation:
        self._state = State(episode_id=str(uuid4()), step_count=0)
        self._hidden = random.Random(seed).randint(1, 100)
        return Observation(reward=0.0)

    def _step_impl(self, action: Action, **_: Any) -> Observation:
        raise ValueError(f"no such action: {action}")

    async def step_async(self, action: Action, **more: Any) -> Observation:
        self._state.step_count += 1
        observation = await super().step_async(action, **more)
        is_hit = isinstance(observation, CallToolObservation) and "yes" in str(observation.result)
        observation.reward = 1.0 if is_hit else 0.0
        return observation

    @property
    def state(self) -> State:
        return self._state


app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=SLOTS)
words = create_fastapi_app(Remembering, Words, Hint, max_concurrent_envs=SLOTS)
tools = create_fastapi_app(ToolGuessing, CallToolAction, CallToolObservation, max_concurrent_envs=SLOTS)


async def private(scope: Any, receive: Any, send: Any) -> None:
    """`words`, for clients with the key. It repeats a wrong key, which no page may show."""
    given = dict(scope.get("headers", ())).get(b"authorization", b"")
    if scope["type"] == "lifespan" or given.decode() == f"Bearer {os.environ['KEY']}":
        await words(scope, receive, send)
    elif scope["type"] == "websocket":
        await send({"type": "websocket.close"})
    else:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"a wrong key: " + given})
