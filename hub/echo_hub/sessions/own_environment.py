"""Adapter of environments that the operator wrote. It runs in the environment's process, with the hub's interpreter.

It makes the environment by the function in `python:MODULE:FUNCTION`, and translates between the JSON values of
`echo_hub.sessions.inside.calls` and the classes of `echo_hub.tasks.environments.base`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import Ending, Environment, Reply, Session
from echo_hub.tasks.registry import make_task
from echo_shared.errors import ConfigError


class OwnSession:
    def __init__(self, session: Session) -> None:
        self._session = session

    async def reset(self) -> dict[str, Any]:
        return asdict(await self._session.reset())

    async def step(self, reply: Mapping[str, Any]) -> dict[str, Any]:
        given = {**reply, "ids": tuple(reply["ids"]), "logprobs": tuple(reply["logprobs"])}
        response = await self._session.step(Reply(**given))
        return {"ending" if isinstance(response, Ending) else "observation": asdict(response)}

    async def score(self) -> dict[str, Any]:
        return {"ending": asdict(await self._session.score())}

    async def close(self) -> None:
        await self._session.close()


class OwnEnvironment:
    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def sample(self, seed: int) -> dict[str, Any]:
        return asdict(self._environment.sample(seed))

    async def open(self, problem: Mapping[str, Any], seed: int) -> OwnSession:
        given = Problem(prompt=problem["prompt"], metadata=problem["metadata"], prompt_ids=tuple(problem["prompt_ids"]))
        return OwnSession(await self._environment.open(given, seed))


def make(options: Mapping[str, Any], place: Mapping[str, Any]) -> OwnEnvironment:
    """Make the environment that `place["task"]` names. Raises ConfigError if the operator's function returns no
    environment with state."""
    environment = make_task(place["task"], options)
    if not isinstance(environment, Environment):
        raise ConfigError("This is not an environment with state.", got=place["task"])
    return OwnEnvironment(environment)
