"""An adapter for tests: a game with hidden state, drawn from the global random number generator. Some replies make it
crash or misbehave.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RefusedError(Exception):
    code = "episode_refused"


class AwayError(Exception):
    code = "environment_away"


class DiceSession:
    def __init__(self, options: Mapping[str, Any], seed: int) -> None:
        self._options = options
        self._seed = seed
        self._rolls = 0

    def reset(self) -> dict[str, Any]:
        print("the game prints something")
        random.seed(self._seed)
        marks = self._options.get("away_unless")
        if marks and not Path(marks).exists():
            raise AwayError("nothing listens there")
        return {"text": "roll"}

    def step(self, reply: Mapping[str, Any]) -> dict[str, Any]:
        self._rolls += 1
        match reply["text"].split():
            case ["end"]:
                return self.score()
            case ["raise"]:
                raise ValueError("a mistake in the game")
            case ["refuse"]:
                raise RefusedError("branches are not supported")
            case ["die"]:
                os.kill(os.getpid(), signal.SIGKILL)
            case ["loop"]:
                while True:
                    pass
            case ["eat"]:
                return {"observation": {"text": str(len(bytearray(2**33)))}}
            case ["start"]:
                script = "import time; time.sleep(1000)"
                child = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
                return {"observation": {"text": str(child.pid)}}
            case ["nonsense"]:
                return {"observation": {"text": 7}}
            case ["chance"]:  # Not replayable: each session says something else.
                return {"observation": {"text": os.urandom(8).hex()}}
        return {"observation": {"text": f"{random.randint(1, 10**9)}", "turn_reward": 0.125}}

    def score(self) -> dict[str, Any]:
        return {"ending": {"reward": min(1.0, self._rolls / 8)}}

    def close(self) -> None:
        if marks := self._options.get("closed"):
            with Path(marks).open("a", encoding="utf-8") as file:
                file.write("closed\n")


class Dice:
    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options

    def sample(self, seed: int) -> dict[str, Any]:
        if seed == self._options.get("refused"):
            raise RefusedError("no such problem")
        return {"prompt": "roll", "metadata": {"seed": seed, "drawn_in": os.getpid()}}

    def open(self, problem: Mapping[str, Any], seed: int) -> DiceSession:
        return DiceSession(self._options, problem["metadata"]["seed"])


def make(options: Mapping[str, Any], place: Mapping[str, Any]) -> Dice:
    time.sleep(options.get("import_s", 0.0))
    return Dice(options)


async def make_later(options: Mapping[str, Any], place: Mapping[str, Any]) -> Dice:
    return Dice(options)
