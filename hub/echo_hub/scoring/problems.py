"""The problem of each group: its prompt's token ids, its seed, and the reward or the next turn after a completion.

A group's problem is a pure function of the run's seed and the group's id. So prompts are not stored: after a restart
they are sampled again. In a run with several tasks, the group's task also follows from the seed and the id
(`echo_hub.core.policy.mixture`). Groups of evaluations use held-out problems. The problem number in their id counts
through all evaluation sets.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
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
from echo_hub.sessions.kinds import SessionPlace
from echo_hub.sessions.process import ProcessEnvironment
from echo_hub.sessions.turn_codec import SessionTask
from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import EnvironmentAway, NoSlot
from echo_hub.tasks.rewards import RewardBounds
from echo_hub.tasks.stream import HeldOutProblems
from echo_shared.sampling.draws import derive_seed


class Problems:
    """The problems of all tasks of a run. Thread-safe: only its caches change."""

    def __init__(
        self,
        tasks: Mapping[str, TaskProblems],
        *,
        mixture: Mixture,
        sets: Sequence[ChosenSet] = (),
        cached: int = CACHED_PROBLEMS,
    ) -> None:
        """`tasks` are keyed by task key, in the order of `mixture`. `sets` are the run's evaluation sets."""
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
        base_dir: Path | None = None,
        run_dir: Path | None = None,
    ) -> Problems:
        """Create the problems from the run's settings. `held_out` holds held-out problems that were already drawn for
        this run, by task. Environments with state need `base_dir`, the base model's directory. They store the drawn
        problems in `run_dir`; without `run_dir`, a restart draws the problems again."""
        place = SessionPlace.of_run(config, codec, base_dir=base_dir, run_dir=run_dir)
        drawn = held_out or {}
        tasks = {
            key: TaskProblems.of_run(config, key, codec, cached=cached, heldout=drawn.get(key), place=place)
            for key in config.task.members
        }
        for task in tasks.values():
            task.stream.others = [other.stream for other in tasks.values() if other is not task]
        return cls(
            tasks,
            mixture=Mixture.of(config.run.seed, [task.weight for task in config.task.members.values()]),
            sets=config.evaluation_sets,
            cached=cached,
        )

    @property
    def multi_turn(self) -> bool:
        return any(task.multi_turn for task in self._in_order)

    @property
    def is_async(self) -> bool:
        return all(task.is_async for task in self._in_order)

    @property
    def codec(self) -> PromptCodec:
        """The codec of the run's first task: tokenizer, prompt texts and tools. The run must have a task."""
        return self._in_order[0].codec

    def rewards_of(self, chosen: ChosenSet) -> RewardBounds:
        return self.tasks[chosen.task].rewards

    def weighing(self, group_id: int) -> Weighing:
        return self.tasks[self.task_of(group_id)].weighing

    def heldout_weighing(self, number: int) -> Weighing:
        return self.tasks[self._set_of(number).task].weighing

    def seed(self, group_id: int) -> int:
        """Return the seed with which a training group's completions are drawn."""
        return derive_seed(self._mixture.run_seed, "draws", group_id)

    def prompt_ids(self, group_id: int) -> NDArray[np.int32]:
        return self._encoded(group_id)

    def task_of(self, group_id: int) -> str:
        """Return the key of the task to which a group belongs."""
        about = EvaluationGroup.of(group_id)
        if about is not None:
            return self._set_of(about.number).task
        return tuple(self.tasks)[self._mixture.place(group_id).task]

    def respond(self, group_id: int, completions: Sequence[NDArray[np.int32]], observed_tokens: int = 0) -> Response:
        """Return the episode's reward (with components if the task has several), or the environment's answer after the
        last turn so far.

        `observed_tokens` is the number of token ids that the environment has added between the turns. Raises the task's
        own errors, and ScorerError for an invalid reward.
        """
        task, problem = self._problem(group_id)
        return task.respond(problem, completions, observed_tokens)

    def session_of(self, group_id: int) -> tuple[str, Problem, int]:
        """Return the task key, the problem and the session seed of a group whose task has state. All sessions of the
        group have the same seed."""
        about = EvaluationGroup.of(group_id)
        problem = self._problem(group_id)[1]
        place = ("training", group_id) if about is None else ("evaluation", about.number)
        return self.task_of(group_id), problem, derive_seed(self._mixture.run_seed, "session", *place)

    def has_state(self, group_id: int) -> bool:
        """Return True if a session host answers the turns of this group's episodes."""
        return self.tasks[self.task_of(group_id)].stateful is not None

    @property
    def session_tasks(self) -> dict[str, SessionTask]:
        """The run's tasks with state, by task key."""
        return {
            key: SessionTask(environment=task.stateful, codec=task.turn_codec)
            for key, task in self.tasks.items()
            if task.stateful is not None
        }

    def asked(self, group_id: int, completions: Sequence[NDArray[np.int32]], _observed_tokens: int = 0) -> Asked:
        """Return the texts that the judges get about an episode of a group. The arguments are those of `respond`."""
        task, problem = self._problem(group_id)
        return task.asked(problem, completions)

    def heldout_asked(self, number: int, completions: Sequence[NDArray[np.int32]], _observed_tokens: int = 0) -> Asked:
        """Return the texts that the judges get about an episode of a held-out problem."""
        task, problem = self._heldout(number)
        return task.asked(problem, completions)

    def heldout_problem(self, number: int) -> tuple[Problem, PromptCodec]:
        """Return a held-out problem, and the codec (tokenizer and prompt texts) of its task."""
        task, problem = self._heldout(number)
        return problem, task.codec

    @property
    def held_out(self) -> dict[str, HeldOutProblems]:
        """Return the held-out problems of each task, for scoring processes. They are drawn at the first use. Empty if
        all tasks have state, because scoring processes do not play such tasks."""
        return {} if self._all_have_state else {key: task.stream.held_out for key, task in self.tasks.items()}

    @property
    def _all_have_state(self) -> bool:
        return all(task.stateful is not None for task in self._in_order)

    def heldout_prompt_ids(self, chosen: ChosenSet | None = None) -> list[NDArray[np.int32]]:
        """Return the token ids of the prompts of an evaluation set; if `chosen` is None, of all sets."""
        sets = self.sets if chosen is None else (chosen,)
        found = []
        for one in sets:
            task = self.tasks[one.task]
            if task.stateful is not None:
                found += [task.problem_ids(task.heldout(number)) for number in range(one.problems)]
            else:
                found += [task.prompt_ids(prompt) for prompt in task.stream.heldout_prompts[: one.problems]]
        return found

    def heldout_respond(
        self, number: int, completions: Sequence[NDArray[np.int32]], observed_tokens: int = 0
    ) -> float | dict[str, float] | NDArray[np.int32]:
        """Return the result of an episode on a held-out problem: the reward, or the environment's answer as the token
        ids up to the next turn."""
        task, problem = self._heldout(number)
        answer = task.respond(problem, completions, observed_tokens)
        return answer.observation_ids if isinstance(answer, EnvironmentReply) else answer

    def training_respond(
        self, group_id: int, completions: Sequence[NDArray[np.int32]], observed_tokens: int = 0
    ) -> float | dict[str, float] | NDArray[np.int32]:
        """Return the same as `heldout_respond`, for an episode on a training problem."""
        answer = self.respond(group_id, completions, observed_tokens)
        return answer.observation_ids if isinstance(answer, EnvironmentReply) else answer

    def training_score(self, group_id: int, text: str) -> float:
        """Return the task's own score of `text` as the answer to a training problem. Raises the errors of `respond`."""
        task, problem = self._problem(group_id)
        return task.score(problem, text)

    def training_problem(self, group_id: int) -> Problem:
        return self._problem(group_id)[1]

    @property
    def content_hash(self) -> str:
        """Hash of the files that hold the tasks' problems; "" if there are none."""
        return "+".join(found for task in self._in_order if (found := task.content_hash))

    def notes(self) -> list[str]:
        """Return a sentence for each task with reference answers that cannot be parsed. Reads files."""
        return [note for task in self._in_order for note in task.notes()]

    def trial_problem(self, seed: int) -> dict[str, Any]:
        return self._in_order[0].trial_problem(seed)

    def trial_respond(self, seed: int, replies: Sequence[str]) -> dict[str, Any]:
        return self._in_order[0].trial_respond(seed, replies)

    def trial_asked(self, seed: int, replies: Sequence[str]) -> Asked:
        return self._in_order[0].trial_asked(seed, replies)

    def close(self) -> None:
        """End the processes of environments with state. Blocks until they have ended."""
        for task in self._in_order:
            if task.stateful is not None and isinstance(task.stateful, ProcessEnvironment):
                task.stateful.stop()

    def prepare(self) -> None:
        """Draw held-out problems and the first training problem now, so that the first request is fast.

        Raises ConfigError if a task has too few problems or its problems are too long; EnvironmentAway and NoSlot.
        """
        for task, quota in zip(self._in_order, self._mixture.quotas, strict=True):
            _ = task.stream.held_out
            if quota:
                task.train(0)

    def prepare_at_start(self) -> str:
        """Call `prepare`. Return "" after success, else the reason for drawing the problems later.

        Only a run whose tasks all have state can draw them later. Other tasks exclude the held-out problems of all
        tasks from training, so they need these problems first.
        """
        try:
            self.prepare()
        except (EnvironmentAway, NoSlot) as error:
            if self._all_have_state:
                return error.brief
            raise
        return ""

    def _encode(self, group_id: int) -> NDArray[np.int32]:
        task, problem = self._problem(group_id)
        return task.problem_ids(problem)

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
