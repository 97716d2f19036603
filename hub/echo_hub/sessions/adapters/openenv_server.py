"""Start an OpenEnv server from a Python module, in the interpreter of the setting sessions.python, and restart the
server when it dies or no longer answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from echo_hub.sessions.adapters.openenv_wire import shortened
from echo_hub.sessions.caging import server_command
from echo_hub.tasks.environments.base import EnvironmentAway
from echo_shared.errors import ConfigError, EchoError

log = logging.getLogger(__name__)

PROGRAM: Final = Path(__file__).parent.parent / "inside" / "openenv_app.py"
SILENT_S: Final = 10.0
"""Seconds within which a server that opens no session must answer some request, or it is ended."""
_LOOK_S: Final = 0.05
_ENDING_S: Final = 3.0
"""Seconds between SIGTERM and SIGKILL when the server is ended."""


class ModuleServer:
    """The OpenEnv server of `module` (MODULE:APP for uvicorn). It starts when its address is first asked for."""

    def __init__(self, module: str, *, directory: str, place: Mapping[str, Any], ready_s: float) -> None:
        """`directory` is the absolute path of the module's folder. `place` holds what the hub says about the run: its
        session settings name the interpreter, and its limits apply to the cage (sandbox) around the server. `ready_s`
        is the longest time of a start, in seconds."""
        self._module = module
        self._directory = Path(directory)
        self._place = place
        self._ready_s = ready_s
        self._process: asyncio.subprocess.Process | None = None
        self._port = 0
        self._has_run = False
        self._starting = asyncio.Lock()
        self._said: deque[str] = deque(maxlen=20)
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the server; None if it does not run."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def origin(self) -> str:
        """Return `127.0.0.1:PORT` of the running server. Starts it if it does not run.

        Raises EnvironmentAway if it does not start; ConfigError if it ends at its first start, or if this system has no
        cage (sandbox) for it.
        """
        async with self._starting:
            if self.pid is None:
                await self._end()
                await self._start()
        return f"127.0.0.1:{self._port}"

    async def end_if_silent(self, within_s: float = SILENT_S) -> None:
        """End the server if it does not answer an HTTP request within this time, for example because an environment
        blocks its event loop. `origin` then starts it again."""
        async with self._starting:
            if self.pid is None or await self._answers(within_s):
                return
            log.warning("The OpenEnv server %s has not answered for %g s. It is restarted.", self._module, within_s)
            await self._end()

    async def close(self) -> None:
        async with self._starting:
            await self._end()

    async def _start(self) -> None:
        self._port = _free_port()
        self._said.clear()
        command = server_command(
            self._place["sessions"]["python"] or sys.executable,
            [str(PROGRAM), self._module, str(self._port), str(self._directory)],
            self._place,
            reads=self._directory,
            port=self._port,
        )
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=self._directory,
                # The interpreter of the server must not find the hub's packages.
                env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
                start_new_session=True,
            )
        except OSError as error:
            raise self._failed(str(error)) from error
        self._reader = asyncio.create_task(self._read(self._process))
        try:
            async with asyncio.timeout(self._ready_s):
                while not await self._is_listening():
                    if self.pid is None:
                        await self._reader
                        raise self._failed(" ".join(list(self._said)[-3:]) or "it ended without a word")
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            await self._end()
            raise self._error(EnvironmentAway, f"it does not listen after {self._ready_s:g} s") from None
        except BaseException:
            await self._end()
            raise
        self._has_run = True

    async def _is_listening(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            return False
        writer.close()
        return True

    async def _answers(self, within_s: float) -> bool:
        """Return True if the server answers a request. Any answer counts, even an error."""
        try:
            async with asyncio.timeout(within_s):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                try:
                    writer.write(b"GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
                    return bool(await reader.read(1))
                finally:
                    writer.transport.abort()
        except OSError:  # TimeoutError is one.
            return False

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Pass the server's output on to this process's log, and remember its last lines."""
        assert process.stdout is not None
        while part := await process.stdout.read(65_536):
            text = part.decode("utf-8", "replace")
            self._said.extend(line for line in text.splitlines() if line.strip())
            sys.stderr.write(text)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ENDING_S):
                    await process.wait()
        if process.stdin is not None:
            process.stdin.close()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])

    def _failed(self, got: str) -> EchoError:
        """Return the error for a server that ended while it started. Before the first successful start, wrong settings
        are the likely cause: ConfigError."""
        return self._error(EnvironmentAway if self._has_run else ConfigError, got)

    def _error(self, kind: type[EchoError], got: str) -> EchoError:
        return kind(
            "The OpenEnv server cannot be started.",
            got=f"{self._module}: {shortened(got)}",
            do="Correct task.name, task.options.directory or sessions.python.",
        )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
