"""An environment with state for tests, which runs in the test's own process. The model must say 3 numbers, and gets
each sum as the answer."""

from __future__ import annotations

from typing import Any

from echo_hub.config.sections import HubConfig
from echo_hub.core.policy.mixture import Mixture
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.task_problems import TaskProblems
from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import Ending, Observation, Opening, Reply, SessionGone
from echo_hub.tasks.stream import ProblemStream


class CountingGame:
    """The reward is the sum of the numbers, divided by 100. `luck` is added to every sum; tests may change it during a
    run. If `dies` is set, the next step of a session fails."""

    name = "counting"
    reward_if_lost = 0.125

    def __init__(self) -> None:
        self.luck = 0
        self.dies = False
        self.steps: list[tuple[int, str]] = []
        """Session and reply of each step."""
        self.open_sessions: set[int] = set()
        self.num_opened = 0

    def sample(self, seed: int) -> Problem:
        return Problem(prompt=f"{seed % 10}=")

    async def open(self, problem: Problem, seed: int) -> CountingSession:
        self.num_opened += 1
        return CountingSession(self, problem, self.num_opened)


class CountingSession:
    def __init__(self, game: CountingGame, problem: Problem, number: int) -> None:
        self._game = game
        self._problem = problem
        self._number = number
        self._said: list[int] = []
        game.open_sessions.add(number)

    async def reset(self) -> Opening:
        return Opening(text=self._problem.prompt)

    async def step(self, reply: Reply) -> Observation | Ending:
        if self._game.dies:
            raise SessionGone("It died.")
        self._game.steps.append((self._number, reply.text))
        self._said.append(int(reply.text) if reply.text.isdigit() else 0)
        if len(self._said) == 3:
            return await self.score()
        return Observation(text=f"{sum(self._said) + self._game.luck}=", turn_reward=self._said[-1] / 100)

    async def score(self) -> Ending:
        return Ending(reward=sum(self._said) / 100)

    async def close(self) -> None:
        self._game.open_sessions.discard(self._number)


def problems_of(game: CountingGame, codec: PromptCodec, config: HubConfig | None = None) -> Problems:
    """Return the problems of a run with the task `game`."""
    given: Any = game
    stream = ProblemStream(given, run_seed=3, heldout_problems=2)
    task = TaskProblems(task=given, stream=stream, codec=codec, max_tokens=4)
    sets = config.evaluation_sets if config is not None else ()
    return Problems({"": task}, mixture=Mixture.of(3, [1.0]), sets=sets)
