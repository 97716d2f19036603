"""Agents: the cost of episodes with many turns, which comes from messages and growing prompts.

- `turn_fixed_ms_p50`: median time on loopback from a turn's lease to the next turn's lease, minus the time in which the
  node samples. The rest goes to messages, queues, two commits, the environment's answer and the node's own store. Two
  episodes run at once; for `turn_fixed_ms_p50_16`, sixteen.
- `prefix_speedup_10_turns`: how many times faster ten turns of a conversation are if the engine keeps the attention
keys and values of earlier turns. It is the smallest value over llama.cpp and PyTorch, `builtin:small` and the real
model.
- `sessions_300_mb`: memory of 300 open sessions of a game of TextArena, with the process that they are forked from.
  `step_ms_p95`: time of a step, from the hub's call to the answer, while a hub trains on the same processors.
- `learns`: the smallest gain in held-out reward over three seeds, of four-round Sokoban and of a game of TextArena.
- `kills`, `lost_or_twice`: number of kills (of the hub, the process that forks sessions, a session, a node and an
  OpenEnv server), and number of turns that were lost or happened twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from benchmarks.agents.kills import game_kills, server_kills
from benchmarks.agents.learning import GUESSING, SOKOBAN, learns
from benchmarks.agents.prefixes import prefix_speedup
from benchmarks.agents.sessions import AGENTS, beside_training, lacks_textarena
from benchmarks.agents.turns import turn_times
from benchmarks.harness import engine, real_model
from benchmarks.harness.progress import AsyncCase, Measurement, Planned, Progress, run_cases

DESCRIPTION: Final = "Episodes of many turns: the fixed cost of a turn, and prompts that are not computed again"


SESSIONS: Final = "sessions beside training"
PREFIXES: Final = {
    f"prefix {backend} {model.removeprefix('builtin:')} {precision}": (backend, model, precision)
    for backend, model, precision in (
        ("llama_cpp", "builtin:small", "f32"),
        ("torch", "builtin:small", "f32"),
        ("mlx", "builtin:small", "f32"),
        ("llama_cpp", "real", "f32"),
        ("llama_cpp", "real", "q8_0"),
        ("torch", "real", "f32"),
        ("torch", "real", "bf16"),
    )
}
"""Engine, base model and precision of each case of a conversation."""
PYTHON: Final = str(AGENTS)
KILLS: Final = ("kills game", "kills server")
LEARNS_GAME: Final = "learns game"
LEARNS: Final = ("learns sokoban", LEARNS_GAME)
CASES: Final[Mapping[str, AsyncCase]] = {
    "turn": (partial(turn_times, at_once=2, figure="turn_fixed_ms_p50"), 25),
    "turn of 16": (partial(turn_times, at_once=16, figure="turn_fixed_ms_p50_16"), 30),
    SESSIONS: (beside_training, 30),
    **{
        name: (
            partial(prefix_speedup, backend=backend, model=model, precision=precision),
            10 if "small" in model else 60,
        )
        for name, (backend, model, precision) in PREFIXES.items()
    },
    "learns sokoban": (partial(learns, settings=SOKOBAN, samples=2), 1_500),
    LEARNS_GAME: (partial(learns, settings=GUESSING, samples=2), 300),
    "kills game": (partial(game_kills, python=PYTHON), 240),
    "kills server": (partial(server_kills, python=PYTHON), 90),
}
"""Cases by name, each a function that measures it and the expected seconds on two idle cores."""
HEADLINE: Final[tuple[str, ...]] = ("turn_fixed_ms_p50", "turn_fixed_ms_p50_16", "sessions_300_mb", "step_ms_p95")


def plan() -> list[Planned]:
    return [Planned(name=name, seconds=seconds, lacks=_lacks(name)) for name, (_, seconds) in CASES.items()]


def _lacks(name: str) -> str:
    if name in (SESSIONS, LEARNS_GAME, *KILLS):
        return lacks_textarena()
    if name not in PREFIXES:
        return ""
    backend, model, precision = PREFIXES[name]
    return engine.lacks(backend, precision) or (real_model.lacks() if model == "real" else "")


def headline(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    figures = {name: value for case in cases.values() for name, value in case.items()}
    found: dict[str, Any] = {name: figures[name] for name in HEADLINE if name in figures}
    judged = [case["speedup"] for name, case in cases.items() if PREFIXES.get(name, ("mlx",))[0] != "mlx"]
    if judged:
        found["prefix_speedup_10_turns"] = min(judged)
    gains = [cases[name]["smallest_gain"] for name in LEARNS if name in cases]
    if gains:
        found["learns"] = min(gains)
    killed = [case for name, case in cases.items() if name in KILLS]
    if killed:
        found |= {name: sum(case[name] for case in killed) for name in ("kills", "lost_or_twice")}
    return found


def measure(seed: int, progress: Progress) -> Measurement:
    """Measure all wanted cases, each in its own processes."""
    return run_cases(CASES, seed, progress, headline)
