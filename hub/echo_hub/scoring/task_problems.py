"""One task of a run: its problems as prompts of the base model, and the reward or the next turn after a completion.

If the next turn would exceed the base model's context, the episode ends there, with the reward that its environment
gives for this case.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echo_hub.config.reward_section import RewardConfig
from echo_hub.config.sections import HubConfig
from echo_hub.judges.asking import Asked
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.weighing import Weighing
from echo_hub.sessions.kinds import SessionPlace, make_any_task
from echo_hub.sessions.turn_codec import TurnCodec
from echo_hub.sessions.turns import NextTurn, TurnAnswer
from echo_hub.tasks.awaited import awaited, is_async
from echo_hub.tasks.base import FileTask, Problem, ReadTask, Task
from echo_hub.tasks.environments.base import AnyEnvironment, Ending, Environment, ReplayedEnvironment, ToolTask
from echo_hub.tasks.rewards import RewardBounds
from echo_hub.tasks.stream import HeldOutProblems, ProblemStream
from echo_shared.errors import ConfigError

log = logging.getLogger(__name__)

CACHED_PROBLEMS: Final = 16_384


class EnvironmentReply(NamedTuple):
    """An environment's answer to a turn, after which the episode continues."""

    observation_ids: NDArray[np.int32]
    """Token ids between this turn and the next: the environment's answer in the form of the chat template."""
    turn_reward: float


Response = float | dict[str, float] | EnvironmentReply
"""The result of a turn: a score, the components of a reward, or (if the episode continues) an environment's answer."""


class _Fitting:
    """Checks that prompts leave space for a completion in the model's context. Logs the prompts that the model's
    tokenizer cannot encode."""

    def __init__(self, codec: PromptCodec, key: str, *, tokens: int) -> None:
        self._codec = codec
        self._key = key
        self._tokens = tokens
        self._failures = 0

    def fits(self, prompt: str) -> bool:
        """Return True if the prompt is short enough. Raises ConfigError if the model's tokenizer cannot encode the
        prompt."""
        try:
            return self._codec.has_room(prompt, tokens=self._tokens)
        except ConfigError as error:
            self._failures += 1
            if self._failures.bit_count() == 1:  # Log only the 1st, 2nd, 4th, 8th ... failure.
                of = f" of {self._key}" if self._key else ""
                log.warning("problems%s passed over, %d so far, the last: %s", of, self._failures, error.brief)
            raise


class TaskProblems:
    """Problems of one task. Thread-safe: only its caches change. Training problems are numbered within the task."""

    def __init__(
        self,
        *,
        task: Task | AnyEnvironment,
        stream: ProblemStream,
        codec: PromptCodec,
        max_tokens: int,
        reward: RewardConfig = RewardConfig(),  # noqa: B008
        is_async: bool = False,
        cached: int = CACHED_PROBLEMS,
    ) -> None:
        """`max_tokens` is the maximum number of tokens of a completion; an episode ends when the context has no space
        for another completion. `cached` is the number of training and of held-out problems that are kept in memory.
        `is_async` is True if the task can answer many calls at the same time. Raises ConfigError if the task's reward
        bounds or weights are invalid."""
        self.weighing = Weighing.of(task, reward)
        self.is_async = is_async
        self.stream = stream
        self._task = task
        # Keep the results of the checks: isinstance() with a protocol takes as long as many scores.
        self._environment: ReplayedEnvironment | None = task if isinstance(task, ReplayedEnvironment) else None
        self.stateful: Environment | None = task if isinstance(task, Environment) else None
        """The task if it is an environment with state, else None. A session host answers its turns; `respond`
        does not."""
        self._scored: Task | None = None if isinstance(task, ReplayedEnvironment | Environment) else task
        self.codec = codec
        """Tokenizer of the base model, with the task's prompt texts and tools."""
        self.turn_codec = TurnCodec(codec, max_tokens=max_tokens)
        self.train = lru_cache(cached)(stream.train)
        self.heldout = lru_cache(cached)(stream.heldout)

    @classmethod
    def of_run(
        cls,
        config: HubConfig,
        key: str,
        codec: PromptCodec,
        *,
        cached: int,
        heldout: HeldOutProblems | None,
        place: SessionPlace,
    ) -> TaskProblems:
        """Create the problems of the run's task `key`. `codec` is the base model's. `heldout` holds problems that were
        drawn before. `place` tells environments with state about the run."""
        wanted = config.task.members[key]
        task = make_any_task(wanted.name, wanted.options, replace(place, key=key))
        own = codec.with_words(system_prompt=wanted.system_prompt or "", prompt_suffix=wanted.prompt_suffix or "")
        own = own.with_tools(task.tools if isinstance(task, ToolTask) else ())
        many = is_async(task)
        if many:
            task = awaited(task, config.task.scorer_timeout_s)
        stream = ProblemStream(
            task,
            run_seed=config.run.seed,
            heldout_problems=max((one.problems for one in config.evaluation_sets if one.task == key), default=0),
            fitting=_Fitting(own, key, tokens=codec.context_tokens - config.sampling.max_tokens),
            heldout=heldout,
            in_epochs=config.task.draws == "epochs",
        )
        return cls(
            task=task,
            stream=stream,
            codec=own,
            max_tokens=config.sampling.max_tokens,
            reward=config.reward,
            is_async=many,
            cached=cached,
        )

    @property
    def rewards(self) -> RewardBounds:
        return self.weighing.rewards

    @property
    def multi_turn(self) -> bool:
        return self._environment is not None or self.stateful is not None

    @property
    def content_hash(self) -> str:
        """Hash of the task's problem files; "" if it has none."""
        return self._task.content_hash if isinstance(self._task, FileTask) else ""

    def prompt_ids(self, prompt: str) -> NDArray[np.int32]:
        return self.codec.encode_prompt(prompt)

    def problem_ids(self, problem: Problem) -> NDArray[np.int32]:
        """Return the token ids of the problem's prompt."""
        return self.turn_codec.prompt_ids(problem)

    def respond(self, problem: Problem, completions: Sequence[NDArray[np.int32]], observed_tokens: int = 0) -> Response:
        """Return the score, the reward components, or the environment's answer after the last turn so far.

        The components are not summed yet: `weighing` does that. `observed_tokens` is the number of token ids that the
        environment has added between the turns. Raises the task's own errors, and ScorerError for an invalid reward.
        """
        replies = [self.codec.reply(ids) for ids in completions]
        if self._scored is not None:
            return self.weighing.scored(self._scored, problem, replies[-1], len(completions[-1]))
        assert self._environment is not None, "the session host answers the turns of an environment with state"
        response = self._environment.respond(problem, replies)
        if isinstance(response, Ending):
            return self.weighing.ended(response, replies, len(completions[-1]))
        observation_ids = self.turn_codec.observation_ids(response, after=int(completions[-1][-1]))
        lengths = [*map(len, completions), observed_tokens, len(observation_ids)]
        if self.turn_codec.has_room(problem, lengths):
            return EnvironmentReply(observation_ids, self.rewards.read_turn(response.turn_reward))
        return self.weighing.cut(response.reward_if_cut, replies, len(completions[-1]))

    def settled(self, answer: TurnAnswer, completions: Sequence[NDArray[np.int32]]) -> Response:
        """Convert a session's answer to the form that `respond` returns. Raises ScorerError for an invalid reward."""
        if isinstance(answer, NextTurn):
            return EnvironmentReply(answer.observation_ids, self.rewards.read_turn(answer.turn_reward))
        if answer.ending is None:
            return self.lost(completions)
        replies = [self.codec.reply(completions[-1])]
        return self.weighing.ended(answer.ending, replies, len(completions[-1]))

    def lost(self, completions: Sequence[NDArray[np.int32]]) -> Response:
        """Return the reward of an episode whose session was lost too often: the reward that the environment declares
        for this case, or the lowest score. Raises ScorerError if the declared reward is invalid."""
        reward = getattr(self.stateful, "reward_if_lost", self.weighing.of_score.lowest)
        return self.weighing.cut(reward, [self.codec.reply(completions[-1])], len(completions[-1]))

    def score(self, problem: Problem, text: str) -> float:
        """Return the task's own score of `text`, without other components. The task must be a single-turn task. Raises
        the errors of `respond`."""
        assert self._scored is not None, "an environment plays, it does not score"
        return self.weighing.of_score.read(self._scored.score(problem, text))

    def asked(self, problem: Problem, completions: Sequence[NDArray[np.int32]]) -> Asked:
        """Return the texts that the judges get about an ended episode."""
        return self._asked(problem, [self.codec.reply(ids) for ids in completions])

    def trial_asked(self, seed: int, replies: Sequence[str]) -> Asked:
        """Return the texts that the judges get about `replies` (texts) to the problem that the task samples from
        `seed`. No run is needed."""
        return self._asked(self._task.sample(seed), replies)

    def _asked(self, problem: Problem, replies: Sequence[str]) -> Asked:
        answer = problem.metadata.get("answer")
        said = "" if answer is None else str(answer)
        return Asked(prompt=problem.prompt, completion="\n\n".join(replies), answer=said)

    def trial_problem(self, seed: int) -> dict[str, Any]:
        """Return the problem that the task samples from `seed`, without a run: `prompt`, `answer` (from the metadata,
        or None) and `reading` (the type as which the task parses the answer). Raises the task's own errors."""
        problem = self._task.sample(seed)
        answer = problem.metadata.get("answer")
        reading = self._task.reading(problem) if isinstance(self._task, ReadTask) else ""
        return {"prompt": problem.prompt, "answer": None if answer is None else str(answer), "reading": reading}

    def notes(self) -> tuple[str, ...]:
        """Return sentences about reference answers of the task that cannot be parsed."""
        return self._task.notes() if isinstance(self._task, ReadTask) else ()

    def trial_respond(self, seed: int, replies: Sequence[str]) -> dict[str, Any]:
        """Return the result after the last of `replies` (texts), without a run: a `reward` like that of `respond`, or
        an `observation`. Raises the errors of `respond`."""
        problem = self._task.sample(seed)
        if self._environment is not None:
            response = self._environment.respond(problem, replies)
            if not isinstance(response, Ending):
                return {"observation": response.text, "turn_reward": self.rewards.read_turn(response.turn_reward)}
            return {"reward": self.weighing.ended(response, replies, self._length(replies[-1]))}
        assert self._scored is not None, "it is one or the other"
        verdict = self._task.verdict(problem, replies[-1]) if isinstance(self._task, ReadTask) else ""
        reward = self.weighing.scored(self._scored, problem, replies[-1], self._length(replies[-1]))
        return {"reward": reward, "verdict": verdict}

    def _length(self, text: str) -> int:
        return len(self.codec.encode_prompt(text)) if text else 0
