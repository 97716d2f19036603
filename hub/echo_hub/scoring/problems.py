"""The problem behind each group: its prompt's token ids, its seed, and what follows a completion: reward or next turn.

A group's problem is a pure function of (run seed, group id), so prompts are never stored: after a restart they are
sampled again and come out the same. Where a run has several tasks, which of them a group is for follows from the same
two (`echo_hub.core.mixture`). The groups of evaluations have held-out problems, whose number is in their id: those of
all evaluation sets stand in one row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo_hub.config.sections import HubConfig
from echo_hub.config.task_sections import ChosenSet
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.core.mixture import Mixture
from echo_hub.judges.asking import Asked
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.task_problems import CACHED_PROBLEMS, Answered, Response, TaskProblems
from echo_hub.scoring.weighing import Weighing
from echo_hub.tasks.base import Problem
from echo_hub.tasks.rewards import RewardBounds
from echo_hub.tasks.stream import HeldOutProblems
from echo_shared.draws import derive_seed


class Problems:
    """Safe to use from several threads: nothing changes but the caches."""

    def __init__(
        self,
        tasks: Mapping[str, TaskProblems],
        *,
        mixture: Mixture,
        sets: Sequence[ChosenSet] = (),
        cached: int = CACHED_PROBLEMS,
    ) -> None:
        """`tasks` by their keys, in the order of the mixture's; `sets`: of held-out problems."""
        self.tasks = tasks
        self.sets = tuple(sets)
        self._in_order = tuple(tasks.values())
        self._mixture = mixture
        self._set_starts = [one.first for one in sets]
        self._encoded = lru_cache(cached)(self._encode)

    @classmethod
    def of_run(
        cls,
        config: HubConfig,
        codec: PromptCodec,
        *,
        cached: int = CACHED_PROBLEMS,
        held_out: Mapping[str, HeldOutProblems] | None = None,
    ) -> Problems:
        """The problems of a run by its settings. `held_out`: as another of the same run has drawn them, by task."""
        members = config.task.members
        drawn = held_out or {}

        def held_out_of_all() -> Iterator[str]:
            return (prompt for task in tasks.values() for prompt in task.stream.held_out.prompts)

        tasks = {
            key: TaskProblems.of_run(config, key, codec, cached=cached, heldout=drawn.get(key), avoid=held_out_of_all)
            for key in members
        }
        return cls(
            tasks,
            mixture=Mixture.of(config.run.seed, [task.weight for task in members.values()]),
            sets=config.evaluation_sets,
            cached=cached,
        )

    @property
    def multi_turn(self) -> bool:
        """Whether an episode may have several turns."""
        return any(task.multi_turn for task in self._in_order)

    @property
    def is_async(self) -> bool:
        """Whether many answers of every task can be waited for at once."""
        return all(task.is_async for task in self._in_order)

    @property
    def codec(self) -> PromptCodec:
        """Of the run's first task: with its own words and tools."""
        return self._in_order[0].codec

    def rewards_of(self, chosen: ChosenSet) -> RewardBounds:
        """The bounds of the rewards in an evaluation set."""
        return self.tasks[chosen.task].rewards

    def weighing(self, group_id: int) -> Weighing:
        """How a reward of a group's task is made of its components."""
        return self.tasks[self.task_of(group_id)].weighing

    def heldout_weighing(self, number: int) -> Weighing:
        """`weighing`, for a held-out problem."""
        return self.tasks[self._set_of(number).task].weighing

    def seed(self, group_id: int) -> int:
        """The seed of the draws of a group of training."""
        return derive_seed(self._mixture.run_seed, "draws", group_id)

    def prompt_ids(self, group_id: int) -> NDArray[np.int32]:
        """The token ids [P] int32 of a group's prompt."""
        return self._encoded(group_id)

    def task_of(self, group_id: int) -> str:
        """The key of a group's task."""
        about = EvaluationGroup.of(group_id)
        if about is not None:
            return self._set_of(about.number).task
        return tuple(self.tasks)[self._mixture.place(group_id).task]

    def respond(self, group_id: int, completions: Sequence[NDArray[np.int32]], observed_tokens: int = 0) -> Response:
        """What follows the last of an episode's turns so far: its score, or the components of its reward, which the
        `weighing` of its task adds up; or what this turn is answered.

        `observed_tokens`: all ids between the turns so far. Raises whatever the task raises, and ScorerError for a
        reward that is none of the task's.
        """
        task, problem = self._problem(group_id)
        return task.respond(problem, completions, observed_tokens)

    def asked(self, group_id: int, completions: Sequence[NDArray[np.int32]], _observed_tokens: int = 0) -> Asked:
        """What judges are given of an episode, by the arguments of `respond`."""
        task, problem = self._problem(group_id)
        return task.asked(problem, completions)

    def heldout_asked(self, number: int, completions: Sequence[NDArray[np.int32]], _observed_tokens: int = 0) -> Asked:
        """`asked`, of a held-out problem."""
        task, problem = self._heldout(number)
        return task.asked(problem, completions)

    def heldout_problem(self, number: int) -> tuple[Problem, PromptCodec]:
        """A held-out problem, and the codec of its task."""
        task, problem = self._heldout(number)
        return problem, task.codec

    @property
    def held_out(self) -> dict[str, HeldOutProblems]:
        """What each task has held out. Draws it."""
        return {key: task.stream.held_out for key, task in self.tasks.items()}

    def heldout_prompt_ids(self, chosen: ChosenSet | None = None) -> list[NDArray[np.int32]]:
        """The token ids [P] int32 of the prompts of an evaluation set; None = of all sets."""
        sets = self.sets if chosen is None else (chosen,)
        found = []
        for one in sets:
            task = self.tasks[one.task]
            found += [task.prompt_ids(prompt) for prompt in task.stream.heldout_prompts[: one.problems]]
        return found

    def heldout_respond(
        self, number: int, completions: Sequence[NDArray[np.int32]], observed_tokens: int = 0
    ) -> float | dict[str, float] | NDArray[np.int32]:
        """`respond`, for an episode of a held-out problem: of an answer, all ids between this turn and the next."""
        task, problem = self._heldout(number)
        answer = task.respond(problem, completions, observed_tokens)
        return answer.observation_ids if isinstance(answer, Answered) else answer

    def training_respond(
        self, group_id: int, completions: Sequence[NDArray[np.int32]], observed_tokens: int = 0
    ) -> float | dict[str, float] | NDArray[np.int32]:
        """`heldout_respond`, for an episode of a training group's problem."""
        answer = self.respond(group_id, completions, observed_tokens)
        return answer.observation_ids if isinstance(answer, Answered) else answer

    def training_score(self, group_id: int, text: str) -> float:
        """The task's own score of a text as the answer to a training group's problem. Raises as `respond` does."""
        task, problem = self._problem(group_id)
        return task.score(problem, text)

    def training_problem(self, group_id: int) -> Problem:
        """The problem of a training group."""
        return self._problem(group_id)[1]

    @property
    def content_hash(self) -> str:
        """Hash of the files that the tasks' problems come from; empty where there are none."""
        return "+".join(found for task in self._in_order if (found := task.content_hash))

    def notes(self) -> list[str]:
        """Sentences on reference answers that are not understood. Reads files."""
        return [note for task in self._in_order for note in task.notes()]

    def trial_problem(self, seed: int) -> dict[str, Any]:
        """`TaskProblems.trial_problem`, of the run's first task."""
        return self._in_order[0].trial_problem(seed)

    def trial_respond(self, seed: int, replies: Sequence[str]) -> dict[str, Any]:
        """`TaskProblems.trial_respond`, of the run's first task."""
        return self._in_order[0].trial_respond(seed, replies)

    def trial_asked(self, seed: int, replies: Sequence[str]) -> Asked:
        """`TaskProblems.trial_asked`, of the run's first task."""
        return self._in_order[0].trial_asked(seed, replies)

    def prepare(self) -> None:
        """Samples the held-out sets, which no training problem may be in: what is asked first takes no longer then.
        Raises ConfigError when a task is too small, or its problems too long."""
        for task, quota in zip(self._in_order, self._mixture.quotas, strict=True):
            if quota:
                task.train(0)
            else:
                _ = task.stream.held_out

    def _encode(self, group_id: int) -> NDArray[np.int32]:
        task, problem = self._problem(group_id)
        return task.prompt_ids(problem.prompt)

    def _problem(self, group_id: int) -> tuple[TaskProblems, Problem]:
        about = EvaluationGroup.of(group_id)
        if about is not None:
            return self._heldout(about.number)
        place = self._mixture.place(group_id)
        task = self._in_order[place.task]
        return task, task.train(place.number)

    def _heldout(self, number: int) -> tuple[TaskProblems, Problem]:
        chosen = self._set_of(number)
        task = self.tasks[chosen.task]
        return task, task.heldout(number - chosen.first)

    def _set_of(self, number: int) -> ChosenSet:
        return self.sets[bisect_right(self._set_starts, number) - 1]
