"""300 sessions of a game of TextArena on a machine that also trains: memory of the sessions, and time of a step."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from benchmarks.harness.site import family, memory_bytes, merged, open_site, wait_until_ready
from echo_hub.config.sections import HubConfig
from echo_hub.config.sessions_section import SessionsConfig
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.sessions.host import SessionHost
from echo_hub.sessions.kinds import SessionPlace, make_any_task
from echo_hub.sessions.process import ProcessEnvironment
from echo_hub.sessions.turn_codec import SessionTask, TurnCodec
from echo_hub.sessions.turns import NextTurn, PlayedTurn, SessionKey
from echo_hub.tasks.base import Problem

ROOT: Final = Path(__file__).resolve().parents[2]
AGENTS: Final = Path(os.environ.get("ECHO_AGENTS", ROOT / "build" / "agents"), "bin", "python")
"""Interpreter with TextArena, as `make agents` installs it."""
GAME: Final = "textarena:GuessTheNumber-v0"
OPTIONS: Final = {"arguments": {"max_number": 100_000}}
"""The numbers to guess from are so many that no guess wins, so no session ends early."""
SESSIONS: Final = 300
PROBLEMS: Final = 8
ROUNDS: Final = 3
TRAINING: Final[Mapping[str, Mapping[str, Any]]] = {
    "run": {"mode": "colocated"},
    "model": {"base": "builtin:small"},
    "task": {"name": "worked"},
    "training": {"steps": 10_000, "groups_per_step": 4, "group_size": 8},
    "sampling": {"max_tokens": 64},
    "evaluation": {"problems": 1},
    "trust": {"verifier": "off"},
}
"""Settings of a hub that samples and trains without nodes during the measurement."""


def lacks_textarena() -> str:
    return "" if AGENTS.exists() else "build/agents (make agents)"


async def beside_training(seed: int, sessions: int = SESSIONS) -> dict[str, Any]:
    """Measure the memory of the sessions and the time of their steps, while a hub trains on the same processors."""
    settings = merged(TRAINING, {"run": {"seed": seed}})
    with tempfile.TemporaryDirectory(prefix="echo-sessions-") as scratch, open_site(Path(scratch), settings) as site:
        wait_until_ready(site.url)
        await asyncio.to_thread(site.wait_for_step, 1, within_s=300.0)
        first = site.newest_step()
        found = await measured(sessions)
        return {**found, "steps_trained": site.newest_step() - first}


async def measured(sessions: int) -> dict[str, Any]:
    """Open all sessions at once and measure their memory. Then measure the time of their steps, one step at a time."""
    config = SessionsConfig(python=str(AGENTS), most=sessions)
    codec = copy(PromptCodec.of_run(HubConfig(), resolve_base("builtin:small")))
    codec.context_tokens = 65_536
    game = make_any_task(GAME, OPTIONS, SessionPlace(config=config))
    assert isinstance(game, ProcessEnvironment)
    problems = await asyncio.to_thread(lambda: [game.sample(seed) for seed in range(PROBLEMS)])
    task = SessionTask(environment=game, codec=TurnCodec(codec, max_tokens=8))
    async with SessionHost.open({"": task}, config) as host:
        player = _Player(host, codec, problems)
        began = time.perf_counter()
        episodes = await asyncio.gather(*(player.step(number, []) for number in range(sessions)))
        opened_s = time.perf_counter() - began
        player.times_s.clear()
        for _ in range(ROUNDS):
            episodes = [await player.step(number, turns) for number, turns in enumerate(episodes)]
        assert game.process.pid is not None and host.num_open == sessions
        return {
            f"sessions_{sessions}_mb": memory_bytes(family(psutil.Process(game.process.pid))) / 2**20,
            "open_s": opened_s,
            "step_ms_p50": 1e3 * statistics.median(player.times_s),
            "step_ms_p95": 1e3 * statistics.quantiles(player.times_s, n=20)[-1],
        }


class _Player:
    """Plays turns of all sessions, and measures the seconds from the call of the hub's `SessionHost` to its answer."""

    def __init__(self, host: SessionHost, codec: PromptCodec, problems: Sequence[Problem]) -> None:
        self._host = host
        self._codec = codec
        self._problems = problems
        self.times_s: list[float] = []

    async def step(self, number: int, turns: list[PlayedTurn]) -> list[PlayedTurn]:
        ids = [*self._codec.ids_of_plain(f"[{len(turns) + 1}]"), self._codec.stop_ids[0]]
        turn = PlayedTurn(completion_ids=np.array(ids, dtype=np.int32))
        problem = self._problems[number % len(self._problems)]
        began = time.perf_counter()
        key = SessionKey(0, number)
        answer = await self._host.respond(key, "", problem=problem, seed=0, turns=[*turns, turn])
        self.times_s.append(time.perf_counter() - began)
        assert isinstance(answer, NextTurn), answer
        return [*turns, replace(turn, observation_ids=answer.observation_ids)]
