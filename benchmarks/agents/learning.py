"""Does a model learn to act? The held-out reward before and after training, for three seeds.

Two environments: Sokoban, played in four rounds, and the game GuessTheNumber of TextArena, unmodified and with the
reward that the game gives. The model is `builtin:small`. It has learnt Sokoban from a teacher that makes mistakes. It
has never seen GuessTheNumber: 1 reply in 50 is a number.

The hub draws all completions itself (co-located mode), so a run is one hub with its learner. Held-out problems of
Sokoban are boards that training does not use. Held-out games of GuessTheNumber have other seeds than the training
games. The prompt and the range of hidden numbers (1 to 9) are the same in training and held-out games. Each result is
the mean reward of sampled episodes. The base model and the last version play the same problems, and the standard error
of a gain comes from the differences between their rewards.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.agents.sessions import AGENTS, GAME
from benchmarks.harness.site import Settings, merged, open_site
from echo_hub.config.file import load_config
from echo_hub.lifecycle.export import evaluate_versions
from echo_hub.run.directory import RunDirectory
from echo_shared.records.run import EvaluationKind

NUM_SEEDS: Final = 3
WITHIN_S: Final = 3_600.0
AT_ONCE: Final = 2
"""Number of runs at a time: one for each core of a small machine."""
_BOTH: Final[Settings] = {
    "run": {"mode": "colocated"},
    "model": {"base": "builtin:small"},
    "trust": {"verifier": "off"},
}
SOKOBAN: Final[Settings] = {
    **_BOTH,
    "task": {"name": "environment:sokoban", "scorer_processes": 1},
    "sampling": {"max_tokens": 16},
    "training": {"steps": 64, "groups_per_step": 16, "learning_rate": 1e-3},
    "evaluation": {"problems": 512},
}
GUESSING: Final[Settings] = {
    **_BOTH,
    "task": {"name": GAME, "options": {"arguments": {"max_number": 9, "max_turns": 4}}},
    "sessions": {"python": str(AGENTS), "most": 128},
    "sampling": {"max_tokens": 1},
    "training": {"steps": 4, "groups_per_step": 16, "learning_rate": 2e-3},
    "evaluation": {"problems": 32},
}
"""Settings of a run on GuessTheNumber. A reply may be one token, a bare number: TextArena's own wrapper of this game
adds the brackets.
"""


async def learns(seed: int, *, settings: Settings, samples: int) -> dict[str, Any]:
    """Train with three consecutive seeds, beginning with `seed`. Return the smallest gain in reward, and the figures of
    each run.

    `samples` is the number of episodes of each held-out problem and version.
    """
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, scratch: str) -> dict[str, Any]:
        async with places:
            return await trained(Path(scratch) / f"seed{number}", merged(settings, {"run": {"seed": number}}), samples)

    with tempfile.TemporaryDirectory(prefix="echo-learns-") as scratch:
        runs = await asyncio.gather(*(one(seed + number, scratch) for number in range(NUM_SEEDS)))
    smallest = min(runs, key=lambda run: run["gain"])
    return {"smallest_gain": smallest["gain"], "its_error": smallest["error"], "runs": runs}


async def trained(scratch: Path, settings: Settings, samples: int) -> dict[str, Any]:
    """Train once. Return the mean held-out rewards of the base and of the last version. Raises RunFailed."""
    began = time.monotonic()
    steps = settings["training"]["steps"]
    run = await asyncio.to_thread(_run, scratch, settings, steps)
    trained_s = time.monotonic() - began
    config = load_config(run.config, {"evaluation": {"samples": samples}})
    measured = await evaluate_versions(config, run, policy_versions=[0, steps])
    rewards = {
        f"{one.kind}_{'after' if one.policy_version else 'before'}": one.mean_reward for one in measured.evaluations
    }
    (paired,) = (one for one in measured.differences if one.kind is EvaluationKind.SAMPLED)
    return {
        "gain": paired.reward_difference,
        "error": paired.reward_error,
        **rewards,
        "trained_s": trained_s,
        "seconds": time.monotonic() - began,
    }


def _run(scratch: Path, settings: Settings, steps: int) -> RunDirectory:
    with open_site(scratch, settings) as site:
        site.wait_for_step(steps, within_s=WITHIN_S)
        return site.run
