"""A session at an OpenEnv server: one WebSocket, one question at a time.

The server makes the session when the socket opens and forgets it when the socket closes. If it has no free slot, it
answers CAPACITY_REACHED before any question. Every wait has a deadline: a server that never answers, or whose answer is
too large, closes the socket, and the session is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, Final, Self

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from echo_hub.sessions.adapters.openenv_options import OpenEnvOptions
from echo_hub.sessions.adapters.openenv_wire import (
    CAPACITY_REACHED,
    ServerAnswer,
    ServerError,
    ServerState,
    Stepped,
    StrangeAnswerError,
    close_message,
    read_answer,
    reset_message,
    shortened,
    state_message,
    step_message,
)
from echo_hub.tasks.environments.base import EnvironmentAway, NoSlot, SessionGone
from echo_shared.errors import ConfigError

PING_S: Final = 20.0
"""Seconds between pings. A session waits minutes for the model's next turn, and proxies close silent connections."""
CLOSE_S: Final = 2.0
"""Longest time in seconds to tell the server that the session is over, before the socket is closed anyway."""
NO_ACCESS: Final = frozenset({401, 403})
"""HTTP status codes with which a server refuses a key."""
_NO_SESSION: Final = frozenset({"FACTORY_ERROR", "SESSION_ERROR"})
"""Error codes with which a server says that it cannot make a session."""


class OpenEnvSocket:
    """WebSocket of one session. Create it with `open`. After any exception, only `close` may be called."""

    def __init__(self, connection: ClientConnection, url: str, options: OpenEnvOptions) -> None:
        self._connection = connection
        self._url = url
        self._options = options

    @classmethod
    async def open(cls, url: str, options: OpenEnvOptions) -> Self:
        """Connect, and make sure that the server has a session for this socket.

        Raises EnvironmentAway if the server cannot be reached or cannot make sessions, NoSlot if it has no free slot,
        and ConfigError if it refuses the hub's key.
        """
        try:
            connection = await connect(
                url,
                open_timeout=options.connect_s,
                close_timeout=CLOSE_S,
                ping_interval=PING_S,
                ping_timeout=max(PING_S, options.answer_s),
                max_size=options.largest_kb * 1024,
                compression=None,
                additional_headers=options.headers,
            )
        except (OSError, InvalidHandshake, InvalidURI, EOFError) as error:
            if isinstance(error, InvalidStatus) and error.response.status_code in NO_ACCESS:
                raise no_access(f"{url}: {error.response.status_code}") from error
            raise EnvironmentAway(
                "The OpenEnv server cannot be reached.",
                got=f"{url}: {shortened(str(error) or type(error).__name__)}",
                do="Start the server, or correct its address in task.name.",
            ) from error
        socket = cls(connection, url, options)
        try:
            await socket._claim()
        except BaseException:
            await socket.close()
            raise
        return socket

    async def reset(self, arguments: Mapping[str, Any]) -> Stepped:
        """Begin an episode. Raises SessionGone."""
        answer = await self._ask(reset_message(arguments), within_s=self._options.answer_s)
        if isinstance(answer, ServerError):
            raise self._gone("The server refused the reset.", answer.text)
        if not isinstance(answer, Stepped):
            raise self._gone("The server answered a reset with something else.", repr(answer))
        return answer

    async def step(self, action: Mapping[str, Any]) -> Stepped | ServerError:
        """Send an action, and return the observation or the server's error: the caller decides whether the model or the
        server made the mistake. Raises SessionGone."""
        answer = await self._ask(step_message(action), within_s=self._options.answer_s)
        if isinstance(answer, ServerState):
            raise self._gone("The server answered a step with something else.", repr(answer))
        return answer

    async def state(self) -> ServerState:
        """Return what the server says about this session. Raises SessionGone."""
        answer = await self._ask(state_message(), within_s=self._options.answer_s)
        if isinstance(answer, ServerState):
            return answer
        raise self._gone("The server does not tell the session's state.", repr(answer))

    async def close(self) -> None:
        """Tell the server that the session is over, and close the socket, within a few seconds."""
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._connection.send(close_message())
                await self._connection.close()
        if self._connection.transport is not None:
            self._connection.transport.abort()

    async def _claim(self) -> None:
        try:
            answer = await self._ask(state_message(), within_s=self._options.connect_s)
        except SessionGone as error:
            raise EnvironmentAway("The OpenEnv server takes no session.", got=error.got, do=error.do) from error
        if not isinstance(answer, ServerError):
            return
        if answer.code == CAPACITY_REACHED:
            raise NoSlot(
                "The OpenEnv server has no free slot.",
                most=answer.most_sessions,
                got=f"{self._url}: {answer.text}",
                do="Raise max_concurrent_envs in the server's create_app, if its environment allows it.",
            )
        if answer.code in _NO_SESSION:
            raise EnvironmentAway(
                "The OpenEnv server cannot make a session.",
                got=f"{self._url}: {answer.text}",
                do="See the server's log.",
            )

    async def _ask(self, message: str, *, within_s: float) -> ServerAnswer:
        """Send a message and return the answer. Raises SessionGone if there is no valid answer within the time."""
        try:
            async with asyncio.timeout(within_s):
                # A server that refuses the session closes the socket first. Its reason can still be read.
                with contextlib.suppress(ConnectionClosed):
                    await self._connection.send(message)
                text = await self._connection.recv()
            # Parsing a large answer takes long, so a thread does it.
            return read_answer(text) if len(text) < 65_536 else await asyncio.to_thread(read_answer, text)
        except TimeoutError as error:
            raise self._gone("The server did not answer in time.", f"nothing within {within_s:g} s") from error
        except ConnectionClosed as error:
            raise self._gone("The server's connection was closed.", self._how(error)) from error
        except StrangeAnswerError as error:
            raise self._gone("The server's answer cannot be used.", str(error)) from error

    def _how(self, error: ConnectionClosed) -> str:
        close = error.sent or error.rcvd
        if close is None:
            return "without a goodbye: the server or the network died"
        if close.code == 1009:
            return f"the answer is larger than task.options.largest_kb = {self._options.largest_kb}"
        return f"code {close.code} {shortened(close.reason)}".strip()

    def _gone(self, what: str, got: str) -> SessionGone:
        return SessionGone(what, got=f"{self._url}: {got}", do="See the server's log.")


def no_access(got: str) -> ConfigError:
    """Return the error for a server that refuses the hub's key."""
    return ConfigError(
        "The OpenEnv server refuses the hub.",
        got=got,
        do="Set task.options.authorization_env to the variable that holds its Authorization header, and check the key.",
    )
