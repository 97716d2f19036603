from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from echo_hub.core.accounting.effects import GroupOpened, GroupsRated
from echo_hub.core.accounting.events import GroupPrepared
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot
from echo_hub.core.policy import curriculum as module
from echo_hub.core.policy.curriculum import TASK_GROUPS, Curriculum, CurriculumSettings, GroupResult
from echo_hub.core.policy.mixture import Mixture, TrainedTask

BenchOf = Callable[..., Any]
SKIP = CurriculumSettings(rule="skip", by="problem")
LEARNABILITY = CurriculumSettings(rule="learnability", by="problem")
TASKS = (TrainedTask(key="one"),)


def of(settings: CurriculumSettings = SKIP, **more: Any) -> Curriculum:
    return Curriculum(settings, **{"run_seed": 3, "mixture": None, "tasks": TASKS, **more})


def result(group_id: int, prompt: int | None, pass_rate: float) -> GroupResult:
    return GroupResult(group_id=group_id, prompt=prompt, pass_rate=pass_rate)


def taken(curriculum: Curriculum, prompt: int | None, ids: Sequence[int] = range(1_000, 3_000)) -> float:
    """Return the share of group ids that the curriculum accepts for this prompt."""
    prepared = (GroupPrepared(group_id=group_id, seed=0, prompt=prompt) for group_id in ids)
    return sum(not curriculum.passes_over(one) for one in prepared) / len(ids)


def test_solved_and_hopeless_problems_come_at_the_floor_and_all_others_always() -> None:
    known = of(results=[result(0, 10, 1.0), result(1, 11, 0.0), result(2, 12, 0.125)], counted_to=2)
    assert taken(known, 10) == pytest.approx(0.1, abs=0.02)
    assert taken(known, 11) == pytest.approx(0.1, abs=0.02)
    assert taken(known, 12) == taken(known, 13) == taken(known, None) == 1


@pytest.mark.parametrize(("rate", "share"), [(0.0, 0.1), (0.125, 0.4375), (0.5, 1.0), (0.875, 0.4375), (1.0, 0.1)])
def test_learnability_takes_a_problem_by_the_variance_of_its_reward(rate: float, share: float) -> None:
    known = of(LEARNABILITY, results=[result(0, 10, rate)], counted_to=0)
    assert taken(known, 10) == pytest.approx(share, abs=0.03)


def test_a_problems_newest_group_counts_in_any_order_of_counting() -> None:
    curriculum = of()
    curriculum.result(7, 10, [1.0, 0.0])
    curriculum.count(7)
    curriculum.result(5, 10, [1.0, 1.0])
    curriculum.count(8)
    assert taken(curriculum, 10) == 1
    curriculum.result(9, 10, [0.0, 0.0])
    assert taken(curriculum, 10) == 1, "group 9 is not counted yet"
    curriculum.count(9)
    assert taken(curriculum, 10) < 0.2


def test_the_rate_lies_between_the_bounds_of_the_tasks_rewards() -> None:
    curriculum = of(tasks=(TrainedTask(key="game", solved_at=10.0, lowest=-10.0),))
    assert curriculum.result(0, 1, [-10.0, 10.0, 0.0]).pass_rate == pytest.approx(0.5)
    assert curriculum.result(1, 1, [10.00001, 10.0]).pass_rate == 1
    assert curriculum.result(2, 1, [-10.0, -10.0]).pass_rate == 0


def test_by_task_a_solved_task_comes_at_the_floor_once_enough_is_known() -> None:
    mixture = Mixture.of(0, [1, 1])
    settings = CurriculumSettings(rule="learnability", by="task")
    curriculum = of(settings, mixture=mixture, tasks=(TrainedTask(key="easy"), TrainedTask(key="hard")))
    easy, hard = ([number for number in range(4_000) if mixture.place(number).task == task] for task in (0, 1))
    for number, group_id in enumerate(easy[:TASK_GROUPS]):
        assert taken(curriculum, None, easy[1_000:1_010]) == 1
        curriculum.result(group_id, number, [1.0, 1.0])
        curriculum.count(group_id)
    for number, group_id in enumerate(hard[:TASK_GROUPS]):
        curriculum.result(group_id, number, [1.0, 0.0])
    curriculum.count(4_000)
    assert taken(curriculum, None, easy[1_000:]) == pytest.approx(0.1, abs=0.03)
    assert taken(curriculum, None, hard[1_000:]) == 1
    assert (curriculum.status.num_solved, curriculum.status.num_between) == (1, 1)


def test_known_problems_are_counted() -> None:
    curriculum = of(results=[result(0, 10, 1.0), result(1, 11, 0.0), result(2, 12, 0.5), result(3, 11, 0.5)])
    curriculum.count(3)
    status = curriculum.status
    assert (status.num_solved, status.num_hopeless, status.num_between, status.num_passed_over) == (1, 0, 2, 0)


def test_a_restarted_hub_forgets_the_same_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curricula remember only the newest groups (here 5). A restarted hub must forget the same groups: otherwise its
    choice of problems would change.
    """
    monkeypatch.setattr(module, "REMEMBERED", 5)
    chance = Random(1)
    curriculum, known = of(), []
    for step in range(40):
        ids = [3 * step + 2, 3 * step, 3 * step + 1]
        known += [curriculum.result(group_id, chance.randrange(7), [chance.choice([0.0, 1.0])] * 2) for group_id in ids]
        curriculum.count(3 * step + 1)
        counted = sorted((one for one in known if one.group_id <= 3 * step + 1), key=lambda one: one.group_id)[-5:]
        uncounted = [one for one in known if one.group_id > 3 * step + 1]
        again = of(results=[*counted, *uncounted], counted_to=3 * step + 1)
        assert again.status == replace(curriculum.status, num_passed_over=0)
        for prompt in range(7):
            assert taken(again, prompt, range(50)) == taken(curriculum, prompt, range(50))


def prepared(group_id: int) -> GroupPrepared:
    return GroupPrepared(group_id=group_id, seed=0, prompt=group_id % 2)


def test_a_skipped_group_makes_room_for_the_next(bench: BenchOf) -> None:
    b = bench(mode="sequential", curriculum=SKIP, tasks=TASKS, run_seed=3, prepare=False)
    b.node("a")
    b.learner()
    b.tell(prepared(0), prepared(1))
    b.rewarded(0, 1.0, 1.0)
    b.rewarded(1, 1.0, 0.0)
    assert [rated.pass_rates for rated in b.of(GroupsRated)] == [((0, 1.0), (1, 0.5))]
    b.train(1)
    opened: list[int] = []
    for group_id in range(2, 40):
        b.tell(prepared(group_id))
        opened += [one.group_id for one in b.of(GroupOpened)]
    assert len(opened) == 2, "a step's groups, and no more"
    assert sum(group_id % 2 == 0 for group_id in opened) <= 1
    status = b.coordinator.status()
    assert status.groups_preparing == 0
    assert status.curriculum is not None and status.curriculum.num_passed_over == opened[-1] - 1 - len(opened)


def test_a_restart_restores_only_counted_results(bench: BenchOf) -> None:
    """The curriculum counts a group's results once the hub has planned a step with that group or a younger one. So it
    ignores younger groups, before a restart and after it."""
    snapshot = CoordinatorSnapshot(
        next_group_id=4,
        results=(result(1, 1, 0.5), result(0, 0, 1.0), result(3, 1, 0.0)),
        newest_planned_group=1,
        trained_steps=1,
        published_version=1,
    )
    b = bench(snapshot, mode="sequential", curriculum=SKIP, tasks=TASKS, run_seed=3)
    status = b.coordinator.status().curriculum
    assert status is not None and (status.num_solved, status.num_between, status.num_hopeless) == (1, 1, 0)
