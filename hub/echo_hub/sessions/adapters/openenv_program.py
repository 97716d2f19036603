"""Adapter of OpenEnv for the sessions' process (`echo_hub.sessions.inside.program`), with which the hub exchanges plain
JSON values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from echo_hub.sessions.adapters.openenv_environment import OpenEnvEnvironment
from echo_hub.sessions.adapters.openenv_options import OpenEnvOptions, ServerPlace
from echo_hub.sessions.adapters.openenv_server import ModuleServer
from echo_hub.sessions.adapters.openenv_session import OpenEnvSession
from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import Ending, Reply, Response


class OpenEnvAdapter:
    """An OpenEnv environment, with the methods and values that the sessions' program expects of each adapter."""

    def __init__(self, environment: OpenEnvEnvironment) -> None:
        self._environment = environment

    async def sample(self, seed: int) -> dict[str, Any]:
        problem = await self._environment.sample(seed)
        return {"prompt": problem.prompt, "metadata": dict(problem.metadata), "prompt_ids": []}

    async def open(self, problem: Mapping[str, Any], seed: int) -> OpenEnvTalk:
        asked = Problem(prompt=problem["prompt"], metadata=problem["metadata"])
        return OpenEnvTalk(await self._environment.open(asked, seed))

    async def aclose(self) -> None:
        await self._environment.aclose()


class OpenEnvTalk:
    """An OpenEnv session, with the methods and values that the sessions' program expects of each adapter."""

    def __init__(self, session: OpenEnvSession) -> None:
        self._session = session

    async def reset(self) -> dict[str, Any]:
        return {"text": (await self._session.reset()).text, "ids": []}

    async def step(self, reply: Mapping[str, Any]) -> dict[str, Any]:
        return _told(await self._session.step(Reply(text=reply["text"])))

    async def score(self) -> dict[str, Any]:
        return _told(await self._session.score())

    async def close(self) -> None:
        await self._session.close()


def make(options: Mapping[str, Any], place: Mapping[str, Any]) -> OpenEnvAdapter:
    """Create the adapter of the task place["task"]. Raises ConfigError for an invalid name or option."""
    read = OpenEnvOptions.read(place["task"], options)
    where = ServerPlace.of(place["task"].partition(":")[2])
    server = None
    if where.module:
        server = ModuleServer(where.module, directory=read.directory, place=place, ready_s=read.connect_s)
    return OpenEnvAdapter(OpenEnvEnvironment(where, read, server))


def _told(response: Response) -> dict[str, Any]:
    kind = "ending" if isinstance(response, Ending) else "observation"
    return {kind: asdict(response)}
