"""Problem of each group: its prompt's token ids, its seed, and the reward or next turn after a completion.

A group's problem is a pure function of (run seed, group id), so prompts are not stored; a restart samples equal ones.
In a run with several tasks, the group's task follows from the same two values (`echo_hub.core.policy.mixture`). Groups
of evaluations use held-out problems; the number in their id counts through all evaluation sets.
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
from echo_hub.core.policy.mixture import Mixture
from echo_hub.judges.asking import Asked
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.task_problems import CACHED_PROBLEMS, EnvironmentReply, Response, TaskProblems
from echo_hub.scoring.weighing import Weighing
from echo_hub.tasks.base import Problem
from echo_hub.tasks.rewards import RewardBounds
from echo_hub.tasks.stream import HeldOutProblems
from echo_shared.sampling.draws import derive_seed


class Problems:
    """Problems of all tasks. Thread-safe: only caches change."""

    def __init__(
        self,
        tasks: Mapping[str, TaskProblems],
        *,
        mixture: Mixture,
        sets: Sequence[ChosenSet] = (),
        cached: int = CACHED_PROBLEMS,
    ) -> None:
        """`tasks` by key, in the order of the mixture; `sets` are the evaluation sets."""
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
        """Create the problems from the run's settings. `held_out`: sets drawn before for this run, by task."""
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
        """True if episodes may have several turns."""
        return any(task.multi_turn for task in self._in_order)

    @property
    def is_async(self) -> bool:
        """True if every task has an async scorer."""
        return all(task.is_async for task in self._in_order)

    @property
    def codec(self) -> PromptCodec:
        """Codec of the run's first task, with its prompt texts and tools."""
        return self._in_order[0].codec

    def rewards_of(self, chosen: ChosenSet) -> RewardBounds:
        """Return the reward bounds of an evaluation set."""
        return self.tasks[chosen.task].rewards

    def weighing(self, group_id: int) -> Weighing:
        """Return the weights of the reward components for a group's task."""
        return self.tasks[self.task_of(group_id)].weighing

    def heldout_weighing(self, number: int) -> Weighing:
        """Return `weighing` for a held-out problem."""
        return self.tasks[self._set_of(number).task].weighing

    def seed(self, group_id: int) -> int:
        """Return the seed for the draws of a training group."""
        return derive_seed(self._mixture.run_seed, "draws", group_id)

    def prompt_ids(self, group_id: int) -> NDArray[np.int32]:
        """Return the token ids [P] int32 of a group's prompt."""
        return self._encoded(group_id)

    def task_of(self, group_id: int) -> str:
        """Return the key of a group's task."""
        about = EvaluationGroup.of(group_id)
        if about is not None:
            return self._set_of(about.number).task
        return tuple(self.tasks)[self._mixture.place(group_id).task]

    def respond(self, group_id: int, completions: Sequence[NDArray[np.int32]], observed_tokens: int = 0) -> Response:
        """Return the score, the reward components, or the environment's answer after the last turn so far.

        The task's `weighing` adds up components. `observed_tokens` counts all ids between the turns so far. Raises the
        task's own errors, and ScorerError for an invalid reward.
        """
        task, problem = self._problem(group_id)
        return task.respond(problem, completions, observed_tokens)

    def asked(self, group_id: int, completions: Sequence[NDArray[np.int32]], _observed_tokens: int = 0) -> Asked:
        """Return the texts of an episode for judges; arguments as of `respond`."""
        task, problem = self._problem(group_id)
        return task.asked(problem, completions)

    def heldout_asked(self, number: int, completions: Sequence[NDArray[np.int32]], _observed_tokens: int = 0) -> Asked:
        """Return `asked` for a held-out problem."""
        task, problem = self._heldout(number)
        return task.asked(problem, completions)

    def heldout_problem(self, number: int) -> tuple[Problem, PromptCodec]:
        """Return a held-out problem and its task's codec."""
        task, problem = self._heldout(number)
        return problem, task.codec

    @property
    def held_out(self) -> dict[str, HeldOutProblems]:
        """Held-out set of each task; drawn on first use."""
        return {key: task.stream.held_out for key, task in self.tasks.items()}

    def heldout_prompt_ids(self, chosen: ChosenSet | None = None) -> list[NDArray[np.int32]]:
        """Return the token ids [P] int32 of an evaluation set's prompts; None = of all sets."""
        sets = self.sets if chosen is None else (chosen,)
        found = []
        for one in sets:
            task = self.tasks[one.task]
            found += [task.prompt_ids(prompt) for prompt in task.stream.heldout_prompts[: one.problems]]
        return found

    def heldout_respond(
        self, number: int, completions: Sequence[NDArray[np.int32]], observed_tokens: int = 0
    ) -> float | dict[str, float] | NDArray[np.int32]:
        """Return `respond` for an episode of a held-out problem; an answer becomes the ids up to the next turn."""
        task, problem = self._heldout(number)
        answer = task.respond(problem, completions, observed_tokens)
        return answer.observation_ids if isinstance(answer, EnvironmentReply) else answer

    def training_respond(
        self, group_id: int, completions: Sequence[NDArray[np.int32]], observed_tokens: int = 0
    ) -> float | dict[str, float] | NDArray[np.int32]:
        """Return `heldout_respond` for an episode of a training group's problem."""
        answer = self.respond(group_id, completions, observed_tokens)
        return answer.observation_ids if isinstance(answer, EnvironmentReply) else answer

    def training_score(self, group_id: int, text: str) -> float:
        """Score a text with the task's own scorer as the answer to a training problem. Raises as `respond`."""
        task, problem = self._problem(group_id)
        return task.score(problem, text)

    def training_problem(self, group_id: int) -> Problem:
        """Return the problem of a training group."""
        return self._problem(group_id)[1]

    @property
    def content_hash(self) -> str:
        """Hash of the tasks' problem files; empty if there are none."""
        return "+".join(found for task in self._in_order if (found := task.content_hash))

    def notes(self) -> list[str]:
        """Return sentences about reference answers that cannot be parsed. Reads files."""
        return [note for task in self._in_order for note in task.notes()]

    def trial_problem(self, seed: int) -> dict[str, Any]:
        """Return `TaskProblems.trial_problem` of the run's first task."""
        return self._in_order[0].trial_problem(seed)

    def trial_respond(self, seed: int, replies: Sequence[str]) -> dict[str, Any]:
        """Return `TaskProblems.trial_respond` of the run's first task."""
        return self._in_order[0].trial_respond(seed, replies)

    def trial_asked(self, seed: int, replies: Sequence[str]) -> Asked:
        """Return `TaskProblems.trial_asked` of the run's first task."""
        return self._in_order[0].trial_asked(seed, replies)

    def prepare(self) -> None:
        """Draw the held-out sets now, to speed up the first request.

        Raises ConfigError if a task is too small or its problems are too long.
        """
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
