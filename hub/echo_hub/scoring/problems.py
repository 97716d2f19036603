"""The problem behind each group: its prompt's token ids, its seed, and what follows a completion: reward or next turn.

A group's problem is a pure function of (run seed, group id), so prompts are never stored: after a restart they are
sampled again and come out the same. The groups of evaluations have held-out problems, whose number is in their id.

An episode whose next turn would not fit the base model's context ends there, with the reward that its environment names
for this case.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echo_hub.config.reward_section import RewardConfig
from echo_hub.config.sections import HubConfig
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.weighing import Weighing
from echo_hub.tasks.awaited import awaited, is_async
from echo_hub.tasks.base import FileTask, Problem, Task
from echo_hub.tasks.environments.base import Ending, Environment, ToolTask
from echo_hub.tasks.registry import make_task
from echo_hub.tasks.rewards import RewardBounds
from echo_hub.tasks.stream import ProblemStream
from echo_shared.draws import derive_seed

CACHED_PROBLEMS: Final = 16_384


class Answered(NamedTuple):
    """What an environment has answered to a turn."""

    observation_ids: NDArray[np.int32]
    """All ids between this turn and the next."""
    turn_reward: float


Response = float | dict[str, float] | Answered
"""A score, components, or what a turn is answered."""


class Problems:
    """Safe to use from several threads: nothing changes but the caches."""

    def __init__(
        self,
        *,
        task: Task | Environment,
        stream: ProblemStream,
        codec: PromptCodec,
        run_seed: int,
        max_tokens: int,
        reward: RewardConfig = RewardConfig(),  # noqa: B008
        is_async: bool = False,
        cached: int = CACHED_PROBLEMS,
    ) -> None:
        """`max_tokens` of a completion: an episode has no room for another turn of that length when it ends. `cached`:
        so many problems of each kind are kept. `is_async`: many answers of the task can be waited for at once. Raises
        ConfigError when the task's bounds of rewards are none, or its weights."""
        self.weighing = Weighing.of(task, reward)
        self.is_async = is_async
        self._task = task
        self._stream = stream
        self.codec = codec
        """With the task's tools, if it gives any."""
        self._run_seed = run_seed
        self._max_tokens = max_tokens
        self._train = lru_cache(cached)(stream.train)
        self._heldout = lru_cache(cached)(stream.heldout)
        self._encoded = lru_cache(cached)(self._encode)

    @classmethod
    def of_run(
        cls,
        config: HubConfig,
        codec: PromptCodec,
        *,
        cached: int = CACHED_PROBLEMS,
        heldout_prompts: Sequence[str] | None = None,
    ) -> Problems:
        """The problems of a run by its settings. `heldout_prompts`: as another of the same run has drawn them."""
        task = make_task(config.task.name, config.task.options)
        codec = codec.with_tools(task.tools if isinstance(task, ToolTask) else ())
        many = is_async(task)
        if many:
            task = awaited(task, config.task.scorer_timeout_s)
        room = codec.context_tokens - config.sampling.max_tokens
        stream = ProblemStream(
            task,
            run_seed=config.run.seed,
            heldout_problems=config.evaluation.problems,
            fits=lambda prompt: len(codec.encode_prompt(prompt)) <= room,
            heldout_prompts=heldout_prompts,
        )
        return cls(
            task=task,
            stream=stream,
            codec=codec,
            run_seed=config.run.seed,
            max_tokens=config.sampling.max_tokens,
            reward=config.reward,
            is_async=many,
            cached=cached,
        )

    @property
    def rewards(self) -> RewardBounds:
        """Between which all rewards of the run are."""
        return self.weighing.rewards

    @property
    def multi_turn(self) -> bool:
        """Whether an episode may have several turns."""
        return isinstance(self._task, Environment)

    def seed(self, group_id: int) -> int:
        """The seed of the draws of a group of training."""
        return derive_seed(self._run_seed, "draws", group_id)

    def prompt_ids(self, group_id: int) -> NDArray[np.int32]:
        """The token ids [P] int32 of a group's prompt."""
        return self._encoded(group_id)

    def respond(self, group_id: int, completions: Sequence[NDArray[np.int32]], observed_tokens: int = 0) -> Response:
        """What follows the last of an episode's turns so far: its score, or the components of its reward, which
        `weighing` adds up; or what this turn is answered.

        `observed_tokens`: all ids between the turns so far. Raises whatever the task raises, and ScorerError for a
        reward that is none of the task's.
        """
        return self._respond(self._problem(group_id), completions, observed_tokens)

    @property
    def heldout_prompts(self) -> tuple[str, ...]:
        """All held-out problems."""
        return self._stream.heldout_prompts

    def heldout_prompt_ids(self) -> list[NDArray[np.int32]]:
        """The token ids [P] int32 of all held-out problems' prompts."""
        return [self.codec.encode_prompt(prompt) for prompt in self.heldout_prompts]

    def heldout_respond(
        self, number: int, completions: Sequence[NDArray[np.int32]], observed_tokens: int = 0
    ) -> float | dict[str, float] | NDArray[np.int32]:
        """`respond`, for an episode of a held-out problem: of an answer, all ids between this turn and the next."""
        answer = self._respond(self._heldout(number), completions, observed_tokens)
        return answer.observation_ids if isinstance(answer, Answered) else answer

    @property
    def content_hash(self) -> str:
        """Hash of the files that the task's problems come from; empty for a task without any."""
        return self._task.content_hash if isinstance(self._task, FileTask) else ""

    def trial_problem(self, seed: int) -> dict[str, Any]:
        """Outside of any run: the problem of a task's own `seed`, its `prompt`, and the `answer` where its metadata
        holds one. Raises whatever the task raises."""
        problem = self._task.sample(seed)
        answer = problem.metadata.get("answer")
        return {"prompt": problem.prompt, "answer": None if answer is None else str(answer)}

    def trial_respond(self, seed: int, replies: Sequence[str]) -> dict[str, Any]:
        """Outside of any run: what follows the last of `replies`, which are text: a `reward`, as `respond` gives it, or
        an `observation`. Raises as `respond` does."""
        problem = self._task.sample(seed)
        if isinstance(self._task, Environment):
            response = self._task.respond(problem, replies)
            if not isinstance(response, Ending):
                return {"observation": response.text, "turn_reward": self.rewards.read_turn(response.turn_reward)}
            return {"reward": self.weighing.ended(response, replies, self._length(replies[-1]))}
        return {"reward": self.weighing.scored(self._task, problem, replies[-1], self._length(replies[-1]))}

    def prepare(self) -> None:
        """Samples the held-out set, which no training problem may be in: what is asked first takes no longer then."""
        self._stream.prepare()

    def _respond(self, problem: Problem, completions: Sequence[NDArray[np.int32]], observed_tokens: int) -> Response:
        replies = [self.codec.reply(ids) for ids in completions]
        if not isinstance(self._task, Environment):
            return self.weighing.scored(self._task, problem, replies[-1], len(completions[-1]))
        response = self._task.respond(problem, replies)
        if isinstance(response, Ending):
            return self.weighing.ended(response, replies, len(completions[-1]))
        messages = [message.fields for message in (response, *response.more)]
        observation_ids = self.codec.encode_answer(messages, after=int(completions[-1][-1]))
        said = len(self.codec.encode_prompt(problem.prompt)) + sum(map(len, completions)) + observed_tokens
        has_room = said + len(observation_ids) + self._max_tokens <= self.codec.context_tokens
        if has_room:
            return Answered(observation_ids, self.rewards.read_turn(response.turn_reward))
        return self.weighing.cut(response.reward_if_cut, replies, len(completions[-1]))

    def _length(self, text: str) -> int:
        """Tokens of a text of no run's."""
        return len(self.codec.encode_prompt(text)) if text else 0

    def _encode(self, group_id: int) -> NDArray[np.int32]:
        return self.codec.encode_prompt(self._problem(group_id).prompt)

    def _problem(self, group_id: int) -> Problem:
        about = EvaluationGroup.of(group_id)
        return self._train(group_id) if about is None else self._heldout(about.number)
