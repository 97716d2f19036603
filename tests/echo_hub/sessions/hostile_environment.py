"""An environment whose turns attack the hub: each reply names an attack. `python:tests.echo_hub.sessions.
hostile_environment:make`, with the paths and ports of the targets as options.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import Ending, Observation, Opening, Reply, Response

PROMPT = "Attack."


class HostileSession:
    def __init__(self, targets: Mapping[str, Any]) -> None:
        self._targets = targets
        self._turns = 0

    async def reset(self) -> Opening:
        return Opening(text=PROMPT)

    async def step(self, reply: Reply) -> Response:
        self._turns += 1
        found = getattr(self, f"_{reply.text}")()
        return Observation(text=f"turn {self._turns}: {found}")

    async def score(self) -> Ending:
        return Ending(reward=0.5)

    async def close(self) -> None:
        return

    def _wait(self) -> str:
        return "nothing"

    def _read_key(self) -> str:
        return Path(self._targets["key"]).read_text()

    def _bomb(self) -> str:
        while True:
            if os.fork() == 0:
                continue

    def _threads(self) -> str:
        while True:
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

    def _memory(self) -> str:
        return str(len(bytearray(8 * 2**30)))

    def _loop(self) -> str:
        while True:
            pass

    def _work(self) -> str:
        until = time.process_time() + 0.2
        while time.process_time() < until:
            pass
        return "worked"

    def _flood(self) -> str:
        for _ in range(10):
            print("x" * 2**20, flush=True)
        return "flooded"

    def _connect(self) -> str:
        socket.create_connection(("127.0.0.1", self._targets["port"]), timeout=5).close()
        return "connected"

    def _fill_disk(self) -> str:
        number = 0
        while True:
            number += 1
            Path(f"file-{number}").write_bytes(bytes(2**20))
            time.sleep(0.01)  # Writing without a break uses up the step's processor time as well.

    def _end_hub(self) -> str:
        os.kill(self._targets["hub"], 0)
        return "signalled"


class HostileEnvironment:
    name = "hostile"

    def __init__(self, targets: Mapping[str, Any]) -> None:
        self._targets = targets

    def sample(self, seed: int) -> Problem:
        return Problem(prompt=PROMPT, metadata={"seed": seed})

    async def open(self, problem: Problem, seed: int) -> HostileSession:
        return HostileSession(self._targets)


def make(targets: Mapping[str, Any]) -> HostileEnvironment:
    return HostileEnvironment(targets)
