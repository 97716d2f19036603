"""OpenEnv servers for tests, started with uvicorn as their users do, in the environment that `make agents` builds."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

from tests.agents import agents_python

WORLDS = Path(__file__).parent / "openenv_worlds"
START_S = 60.0
FAIL, STALL, NAN, HUGE, DIE = -1, -2, -3, -4, -5
"""Guesses that make the servers of `openenv_worlds` misbehave."""


def initialised(folder: Path, name: str = "my_env") -> Path:
    """Make an environment with `openenv init`, without changes; return its directory."""
    openenv = agents_python().parent / "openenv"
    subprocess.run(
        [openenv, "init", name, "-o", folder],
        check=True,
        capture_output=True,
        timeout=START_S,
        env={**os.environ, "HOME": str(folder)},
    )
    return folder / name


class OpenEnvServer:
    """A server on a free port. After a restart it uses the same port. Its methods block."""

    def __init__(self, app: str, directory: Path = WORLDS, *, slots: int = 64) -> None:
        self._app = app
        self._directory = directory
        self._slots = slots
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port: int = found.getsockname()[1]

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/ws"

    @property
    def task(self) -> str:
        return f"openenv:{self.url}"

    def start(self) -> None:
        """Start or restart the server, and wait until it listens."""
        self.kill()
        command = [agents_python(), "-m", "uvicorn", self._app, "--port", str(self.port), "--log-level", "warning"]
        environment = {**os.environ, "SLOTS": str(self._slots)}
        self._process = subprocess.Popen(list(map(str, command)), cwd=self._directory, env=environment)
        until = time.monotonic() + START_S
        while not self._is_listening():
            assert self._process.poll() is None, "the server died at its start"
            assert time.monotonic() < until, "the server does not listen"
            time.sleep(0.05)

    def kill(self) -> None:
        """End the server by SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> OpenEnvServer:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _is_listening(self) -> bool:
        with socket.socket() as asking:
            return asking.connect_ex(("127.0.0.1", self.port)) == 0
