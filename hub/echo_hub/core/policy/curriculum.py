"""Curriculum: skip problems by their past pass rate, because solved and hopeless problems teach nothing.

A group with equal rewards has no advantage, so sampling it is wasted. Each group id has a fixed problem, so skipping an
id skips its problem. A problem with pass rate p is opened with this probability:

    skip            1 if 0 < p < 1, else `FLOOR`
    learnability    4 p (1 - p), at least `FLOOR`. A reward of 0 or 1 has variance p (1 - p), at most 1/4. "Learning to
                    Reason at the Frontier of Learnability" (arXiv 2502.12272) orders problems by this variance

A problem of unknown rate is always opened. `FLOOR` retries hopeless problems after the model has improved, and solved
problems in case of forgetting. The pass rate is that of the prompt's newest group (`by` = "problem") or of the task's
newest `TASK_GROUPS` groups (`by` = "task").

A group's rate influences choices only once a step is planned whose batch has this group or a younger one. So in
co-located and sequential mode the skipped ids depend on the groups alone, not on the order of completion. A restarted
run skips the same ids.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, Literal

from echo_hub.core.accounting.events import GroupPrepared
from echo_hub.core.policy.mixture import Mixture, TrainedTask
from echo_shared.sampling.draws import derive_seed

TASK_GROUPS: Final = 32
"""Number of newest groups that determine a task's pass rate. Set by hand."""
REMEMBERED: Final = 2**17
"""Number of newest groups whose rates are remembered, in memory and across restarts. Set by hand to bound the
memory."""
FLOOR: Final = 0.1
"""Lowest probability with which a problem is opened. Set by hand.

At 0 a hopeless problem would never return, and a run of solved problems would open no group. A tenth of the groups is a
small price for noticing changes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumSettings:
    """The rule by which problems are skipped; `by`: pass rates are kept for each problem, or for each task."""

    rule: Literal["skip", "learnability"]
    by: Literal["problem", "task"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """Pass rate of one complete group."""

    group_id: int
    prompt: int | None
    """Key of the prompt; None if unknown."""
    pass_rate: float
    """Mean reward, scaled to 0 .. 1 between the task's lowest reward and its threshold for solved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumStatus:
    """Counts of problems, or of tasks, by difficulty."""

    by: str
    num_solved: int
    num_hopeless: int
    num_between: int
    num_passed_over: int
    """Number of skipped problems since the hub's start."""


class Curriculum:
    """Keeps the newest pass rate of each prompt and each task, and decides which group ids are skipped."""

    def __init__(
        self,
        settings: CurriculumSettings,
        *,
        run_seed: int,
        mixture: Mixture | None,
        tasks: Sequence[TrainedTask],
        results: Iterable[GroupResult] = (),
        counted_to: int = -1,
    ) -> None:
        """`results`: pass rates that the store has from before the hub's restart. `counted_to`: youngest group in any
        step's batch so far; -1 = none.
        """
        self._settings = settings
        self._run_seed = run_seed
        self._mixture = mixture
        self._tasks = tasks
        self._of_prompt: dict[int, GroupResult] = {}
        self._of_task: list[list[tuple[int, float]]] = [[] for _ in tasks]
        self._num_problems = Counter[str]()
        """Number of prompts in `_of_prompt` by difficulty: solved, hopeless or between."""
        self._remembered: list[tuple[int, int]] = []
        """Groups whose pass rates influence choices, in ascending order of id, with their prompts."""
        self._uncounted = list(results)
        self._num_passed_over = 0
        self.count(counted_to)

    @property
    def status(self) -> CurriculumStatus:
        counted = self._num_problems
        if self._settings.by == "task":
            rates = map(self._task_rate, range(len(self._tasks)))
            counted = Counter(_difficulty(rate) for rate in rates if rate is not None)
        return CurriculumStatus(
            by=self._settings.by,
            num_solved=counted["solved"],
            num_hopeless=counted["hopeless"],
            num_between=counted["between"],
            num_passed_over=self._num_passed_over,
        )

    def result(self, group_id: int, prompt: int | None, rewards: Sequence[float]) -> GroupResult:
        """Return the pass rate of a complete group. This rate influences which problems are skipped only after `count`
        was called with this group id or a higher one."""
        task = self._tasks[self._task_of(group_id)]
        found = GroupResult(group_id=group_id, prompt=prompt, pass_rate=task.pass_rate(rewards))
        self._uncounted.append(found)
        return found

    def count(self, newest_group: int) -> None:
        """Let the pass rates of all groups up to id `newest_group` influence which problems are skipped from now on."""
        waiting = []
        for result in self._uncounted:
            if result.group_id <= newest_group:
                self._add(result)
            else:
                waiting.append(result)
        self._uncounted = waiting
        forgotten, self._remembered = self._remembered[:-REMEMBERED], self._remembered[-REMEMBERED:]
        for group_id, prompt in forgotten:
            if self._of_prompt[prompt].group_id == group_id:
                self._forget(prompt)

    def passes_over(self, prepared: GroupPrepared) -> bool:
        """Decide if this group's problem is skipped, by its pass rate and a pseudorandom number that the run's seed and
        the group's id determine."""
        rate = self._rate(prepared)
        if rate is None:
            return False
        draw = derive_seed("curriculum", self._run_seed, prepared.group_id) / 2**64
        is_left_out = draw >= max(FLOOR, self._wanted(rate))
        self._num_passed_over += is_left_out
        return is_left_out

    def _wanted(self, rate: float) -> float:
        if self._settings.rule == "skip":
            return float(0 < rate < 1)
        return 4 * rate * (1 - rate)

    def _rate(self, prepared: GroupPrepared) -> float | None:
        if self._settings.by == "task":
            return self._task_rate(self._task_of(prepared.group_id))
        known = None if prepared.prompt is None else self._of_prompt.get(prepared.prompt)
        return None if known is None else known.pass_rate

    def _task_rate(self, task: int) -> float | None:
        """Return the task's mean pass rate; None until `TASK_GROUPS` of its groups influence choices."""
        newest = self._of_task[task]
        return fmean(rate for _, rate in newest) if len(newest) == TASK_GROUPS else None

    def _task_of(self, group_id: int) -> int:
        return 0 if self._mixture is None else self._mixture.place(group_id).task

    def _add(self, result: GroupResult) -> None:
        """Add a result that influences choices from now on. Of several results of one prompt, that of the youngest
        group is kept."""
        of_task = self._of_task[self._task_of(result.group_id)]
        insort(of_task, (result.group_id, result.pass_rate))
        del of_task[:-TASK_GROUPS]
        if result.prompt is None:
            return
        insort(self._remembered, (result.group_id, result.prompt))
        known = self._of_prompt.get(result.prompt)
        if known is not None and known.group_id > result.group_id:
            return
        if known is not None:
            self._forget(result.prompt)
        self._of_prompt[result.prompt] = result
        self._num_problems[_difficulty(result.pass_rate)] += 1

    def _forget(self, prompt: int) -> None:
        self._num_problems[_difficulty(self._of_prompt.pop(prompt).pass_rate)] -= 1


def _difficulty(rate: float) -> str:
    return "solved" if rate >= 1 else "hopeless" if rate <= 0 else "between"
