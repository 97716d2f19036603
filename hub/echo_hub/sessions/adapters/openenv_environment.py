"""An OpenEnv environment: problems and sessions at one server.

Runs in the process that all sessions of this environment share, because a session only talks to the server. It is a
process of its own, because reading a large answer would block the hub's event loop.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Final

from echo_hub.config.toml_text import as_toml
from echo_hub.sessions.adapters.openenv_options import PLACEHOLDER, OpenEnvOptions, ServerPlace
from echo_hub.sessions.adapters.openenv_server import ModuleServer
from echo_hub.sessions.adapters.openenv_session import OpenEnvSession, reset_arguments
from echo_hub.sessions.adapters.openenv_socket import NO_ACCESS, OpenEnvSocket, no_access
from echo_hub.sessions.adapters.openenv_texts import prompt_text, tools_of
from echo_hub.sessions.adapters.openenv_wire import Stepped, StrangeAnswerError, read_stepped, shortened
from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import EnvironmentAway, SessionGone
from echo_shared.errors import ConfigError

SEEDS: Final = 2**31
"""Number of different seeds that a server gets. NumPy's and other generators take no larger ones."""
_NO_SUCH_ROUTE: Final = frozenset({404, 405})


class OpenEnvEnvironment:
    """Draws problems and opens sessions at one OpenEnv server. `server` also starts the server, if the task names a
    module instead of an address."""

    def __init__(self, place: ServerPlace, options: OpenEnvOptions, server: ModuleServer | None) -> None:
        self._place = place
        self._options = options
        self._server = server

    async def sample(self, seed: int) -> Problem:
        """Return the problem of `seed`. If the prompt shows the first observation, ask the server for it.

        Raises EnvironmentAway if the server cannot be reached, NoSlot if only a session can ask the server and the
        server has no free slot for one, SessionGone if its answer cannot be used, and ConfigError if the run does not
        name the server's tools or the server refuses the hub's key.
        """
        number = seed % SEEDS
        if self._options.action_form == "tools" and not self._options.tools:
            raise await self._tools_missing()
        shown = None
        if PLACEHOLDER in self._options.prompt:
            shown = (await self._opening(number if self._options.seed else None)).observation
        try:
            return Problem(prompt=prompt_text(shown, self._options), metadata={"seed": number})
        except StrangeAnswerError as error:
            raise SessionGone("The server's answer cannot be used.", got=str(error)) from error

    async def open(self, problem: Problem, _seed: int) -> OpenEnvSession:
        """Open a session. Reset it with the problem's seed, not with the session's: the first observation must match
        the problem's prompt.

        Raises EnvironmentAway, and NoSlot.
        """
        place = await self._running()
        try:
            socket = await OpenEnvSocket.open(place.url, self._options)
        except EnvironmentAway:
            if self._server is not None:
                await self._server.end_if_silent()
            raise
        return OpenEnvSession(socket, self._options, seed=problem.metadata["seed"] if self._options.seed else None)

    async def aclose(self) -> None:
        """End the server, if this environment has started it."""
        if self._server is not None:
            await self._server.close()

    async def _running(self) -> ServerPlace:
        """Return the address of the server. Starts it if it is a module. Raises EnvironmentAway."""
        if self._server is None:
            return self._place
        return ServerPlace(url=f"ws://{await self._server.origin()}/ws")

    async def _tools_missing(self) -> ConfigError:
        """Return the error that tells the operator which tools the server has."""
        place = await self._running()
        socket = await OpenEnvSocket.open(place.url, self._options)
        try:
            await socket.reset(reset_arguments(self._options, None))
            answer = await socket.step({"type": "list_tools"})
        finally:
            await socket.close()
        tools = tools_of(answer.observation) if isinstance(answer, Stepped) else []
        return ConfigError(
            'form = "tools" needs the definitions of the tools, because every prompt shows them.',
            got=f"{place.url} has {', '.join(tool['name'] for tool in tools) or 'no tools'}",
            do=f"Set this in task.options: tools = {as_toml(tools)}" if tools else "Choose another form.",
        )

    async def _opening(self, seed: int | None) -> Stepped:
        """Return the server's answer to a reset with `seed`. `POST /reset` makes a new environment on the server, so it
        takes no session's slot."""
        arguments = reset_arguments(self._options, seed)
        place = await self._running()
        found = await asyncio.to_thread(self._posted, place.reset_url, json.dumps(arguments).encode())
        if found is not None:
            return found
        socket = await OpenEnvSocket.open(place.url, self._options)
        try:
            return await socket.reset(arguments)
        finally:
            await socket.close()

    def _posted(self, url: str, body: bytes) -> Stepped | None:
        """Return the answer to `POST /reset`; None if the server has no such route. Raises EnvironmentAway, and
        SessionGone if the answer cannot be used."""
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        for name, value in self._options.headers.items():
            request.add_unredirected_header(name, value)  # A redirect to another server must not carry the key.
        most = self._options.largest_kb * 1024
        try:
            with urllib.request.urlopen(request, timeout=self._options.answer_s) as answer:
                text = answer.read(most + 1)
        except urllib.error.HTTPError as error:
            if error.code in _NO_SUCH_ROUTE:
                return None
            said = shortened(self._options.concealed(error.read(4096).decode("utf-8", "replace")))
            if error.code in NO_ACCESS:
                raise no_access(f"{url}: {error.code} {said}") from error
            raise SessionGone("The server refused the reset.", got=f"{url}: {error.code} {said}") from error
        except (OSError, ValueError) as error:
            raise EnvironmentAway(
                "The OpenEnv server cannot be reached.",
                got=f"{url}: {shortened(str(error))}",
                do="Start the server, or correct its address in task.name.",
            ) from error
        if len(text) > most:
            raise SessionGone(
                "The server's answer cannot be used.",
                got=f"{url}: it is larger than task.options.largest_kb = {self._options.largest_kb}",
            )
        try:
            return read_stepped(json.loads(text))
        except (StrangeAnswerError, ValueError, RecursionError) as error:
            raise SessionGone("The server's answer cannot be used.", got=shortened(str(error))) from error
