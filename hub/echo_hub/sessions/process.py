"""Environments whose sessions run in a process of their own. The session host opens these sessions, and problems are
drawn from them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from echo_hub.sessions.openings import Openings
from echo_hub.sessions.program_process import SessionProcess
from echo_hub.sessions.reading import LONGEST_LINE, ProgramAnswer, problem_fields, read_answer
from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import (
    Ending,
    EnvironmentAway,
    EpisodeRefused,
    Opening,
    ProcessDied,
    Reply,
    Response,
    SessionGone,
)
from echo_shared.errors import ConfigError

GRACE_S: Final = 1.0
"""Seconds that a session has to close itself. After that, the hub kills its process."""


class ProcessEnvironment:
    """An environment with state whose sessions run in `process`. It implements `echo_hub.tasks.environments.base`."""

    def __init__(
        self,
        name: str,
        process: SessionProcess,
        *,
        openings: Openings,
        declared: Mapping[str, Any],
        drawing_s: float,
    ) -> None:
        """`declared` maps attributes of the environment, such as `reward_bounds` and `max_turns`, to their values.
        `drawing_s` limits the time to draw a problem, in seconds."""
        self.name = name
        self.process = process
        self._openings = openings
        self._drawing_s = drawing_s
        self._connecting = ThreadPoolExecutor(1, thread_name_prefix="sessions")
        """Thread that waits until the process opens a session, which may take long. The event loop's own threads are
        too few for that."""
        self._has_problems = False
        for attribute, value in declared.items():
            setattr(self, attribute, value)

    def sample(self, seed: int) -> Problem:
        """Return the problem of `seed` from the run's file. If the file lacks it, open a session and take its first
        prompt.

        Raises EnvironmentAway, NoSlot and SessionGone; also ConfigError, until one problem was drawn. After that, the
        settings cannot be wrong, so EnvironmentAway replaces ConfigError.
        """
        known = self._openings.get(seed)
        if known is None:
            try:
                known = self._openings.put(seed, self._drawn(seed))
            except ConfigError as error:
                if self._has_problems:
                    raise EnvironmentAway(error.what, got=error.got, do=error.do) from error
                raise
        self._has_problems = True
        return known

    def _drawn(self, seed: int) -> Problem:
        number, line = self.process.connect()
        try:
            line.settimeout(self._drawing_s)
            line.sendall(_call("sample", seed=seed))
            with line.makefile("rb") as answers:
                problem = read_answer(answers.readline(LONGEST_LINE)).problem
        except OSError as error:
            raise SessionGone(f"No problem was drawn in {self._drawing_s:g} s.", got=repr(error)) from error
        except EpisodeRefused as error:
            raise SessionGone("The environment refuses to draw a problem.", got=error.brief) from error
        finally:
            line.close()
            self.process.end(number)
        if problem is None:
            raise SessionGone("The environment gave no problem.")
        return problem

    async def open(self, problem: Problem, seed: int) -> ProcessSession:
        connecting = self._connecting.submit(self.process.connect)
        try:
            number, line = await asyncio.shield(asyncio.wrap_future(connecting))
        except asyncio.CancelledError:
            if not connecting.cancel():  # It has begun.
                connecting.add_done_callback(self._give_up)
            raise
        return await ProcessSession.of(self.process, number, line, problem, seed)

    def _give_up(self, connecting: Future[tuple[int, socket.socket]]) -> None:
        """End the session that was being opened for a caller that is now cancelled."""
        if connecting.exception() is None:
            number, line = connecting.result()
            line.close()
            self.process.end(number)

    def stop(self) -> None:
        """End the process with all its sessions."""
        self.process.stop()
        self._openings.close()


class ProcessSession:
    """One session in the environment's process."""

    def __init__(
        self,
        process: SessionProcess,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        sending: socket.socket,
        beginning: bytes,
    ) -> None:
        self._process = process
        self._number = number
        self._reader = reader
        self._writer = writer
        self._sending = sending
        self._beginning = beginning
        self._is_busy = False

    @classmethod
    async def of(
        cls, process: SessionProcess, number: int, line: socket.socket, problem: Problem, seed: int
    ) -> ProcessSession:
        reader, writer = await asyncio.open_connection(sock=line, limit=LONGEST_LINE)
        # Calls go out by a descriptor of their own: a failed write must not end the stream that holds a dying session's
        # last line.
        sending = line.dup()
        beginning = _call("reset", problem=problem_fields(problem), seed=seed)
        return cls(process, number, reader, writer, sending, beginning)

    async def reset(self) -> Opening:
        opening = (await self._answer(self._beginning)).opening
        if opening is None:
            raise SessionGone("The session did not begin its episode.")
        return opening

    async def step(self, reply: Reply) -> Response:
        fields = {
            "text": reply.text,
            "ids": list(reply.ids),
            "logprobs": list(reply.logprobs),
            "finish_reason": reply.finish_reason,
        }
        answer = await self._answer(_call("step", reply=fields))
        response = answer.observation or answer.ending
        if response is None:
            raise SessionGone("The session answered a step with neither an observation nor an ending.")
        return response

    async def score(self) -> Ending:
        ending = (await self._answer(_call("score"))).ending
        if ending is None:
            raise SessionGone("The session gave no score.")
        return ending

    async def close(self) -> None:
        """End the session and return when its process has ended. If no call is under way, the session closes itself;
        otherwise it is killed."""
        try:
            if not self._is_busy:
                with contextlib.suppress(SessionGone, TimeoutError):
                    await asyncio.wait_for(self._answer(_call("close")), GRACE_S)
            self._process.end(self._number)
            with contextlib.suppress(OSError):
                while await self._reader.read(65_536):
                    pass
        finally:
            self._process.end(self._number)
            self._writer.close()
            self._sending.close()

    async def _answer(self, call: bytes) -> ProgramAnswer:
        """Send a call, and return its answer. After cancellation, the session still works on the call, so the hub must
        kill it."""
        self._is_busy = True
        self._process.allow_cpu(self._number)
        try:
            with contextlib.suppress(ConnectionError):
                await asyncio.get_running_loop().sock_sendall(self._sending, call)
            line = b""
            while not line.strip():  # A dying session's last line begins with a newline.
                line = await self._reader.readline()
                if not line:
                    raise self._ended()
        except OSError as error:
            raise self._ended() from error
        except ValueError as error:
            raise SessionGone(f"The session's answer is longer than {LONGEST_LINE} bytes.") from error
        answer = read_answer(line)
        self._is_busy = False
        return answer

    def _ended(self) -> SessionGone:
        """Return the error for a session whose socket has closed without a last line."""
        if self._process.has_died(self._number):
            return ProcessDied("The sessions' process has died.")
        return SessionGone("The session's process has ended.")


def _call(do: str, **arguments: Any) -> bytes:
    return json.dumps({"do": do, **arguments}).encode() + b"\n"
