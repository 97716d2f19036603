"""The problem behind each group: its prompt's token ids, its seed, and the reward of a completion.

A group's problem is a pure function of (run seed, group id), so prompts are never stored: after a restart they are
sampled again and come out the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.base_model import PromptCodec
from echo_hub.config import HubConfig
from echo_hub.tasks.base import Problem, Task
from echo_hub.tasks.registry import make_task
from echo_hub.tasks.stream import ProblemStream
from echo_shared.draws import derive_seed

CACHED_PROBLEMS: Final = 16_384
FULL_REWARD: Final = 1.0 - 1e-6
"""A held-out problem counts as solved from this reward on: graders give less for a right format alone."""


def accuracy(rewards: Sequence[float]) -> float:
    """The share of problems that are solved."""
    return sum(reward >= FULL_REWARD for reward in rewards) / len(rewards)


class Problems:
    """Safe to use from several threads: nothing changes but the caches."""

    def __init__(
        self, *, task: Task, stream: ProblemStream, codec: PromptCodec, run_seed: int, num_heldout: int
    ) -> None:
        self._task = task
        self._stream = stream
        self._codec = codec
        self._run_seed = run_seed
        self._num_heldout = num_heldout
        self._train = lru_cache(CACHED_PROBLEMS)(self._sample)

    @classmethod
    def of_run(cls, config: HubConfig, codec: PromptCodec, *, num_heldout: int | None = None) -> Problems:
        """What the run's settings say; `num_heldout` asks for other than its number of held-out problems."""
        task = make_task(config.task.name, config.task.options)
        count = num_heldout or config.task.heldout_problems
        return cls(
            task=task,
            stream=ProblemStream(task, run_seed=config.run.seed, heldout_problems=count),
            codec=codec,
            run_seed=config.run.seed,
            num_heldout=count,
        )

    def seed(self, group_id: int) -> int:
        """The seed of the group's draws."""
        return derive_seed(self._run_seed, "draws", group_id)

    def prompt_ids(self, group_id: int) -> NDArray[np.int32]:
        return self._train(group_id)[1]

    def reward(self, group_id: int, completion_ids: NDArray[np.int32]) -> float:
        """Raises whatever the task's scorer raises."""
        return float(self._task.score(self._train(group_id)[0], self._codec.decode(completion_ids)))

    def heldout_prompts(self) -> list[NDArray[np.int32]]:
        """All held-out problems as token ids."""
        return [self._codec.encode_prompt(self._stream.heldout(n).prompt) for n in range(self._num_heldout)]

    def heldout_rewards(self, completions: Sequence[NDArray[np.int32]]) -> list[float]:
        """The rewards of one completion of each held-out problem, in order."""
        return [
            float(self._task.score(self._stream.heldout(number), self._codec.decode(ids)))
            for number, ids in enumerate(completions)
        ]

    def _sample(self, group_id: int) -> tuple[Problem, NDArray[np.int32]]:
        problem = self._stream.train(group_id)
        return problem, self._codec.encode_prompt(problem.prompt)
