from __future__ import annotations

from dataclasses import replace

import pytest

from echo_hub.operation.problems import END_S, ProblemKind, RunObservation, RunProblems

FINE = RunObservation(nodes_connected=3)
ALONE = RunObservation(lacks_nodes=True, learner_waits=True)


def kinds(problems: RunProblems) -> list[ProblemKind]:
    return [problem.kind for problem in problems.active]


def told(problems: RunProblems, seen: RunObservation, now: float) -> list[tuple[ProblemKind, bool]]:
    return [(change.problem.kind, change.began) for change in problems.observe(seen, now)]


def test_a_problem_begins_once_and_ends_after_a_quiet_time() -> None:
    problems = RunProblems(learner_idle_s=600.0, disk_free_bytes=1_000)
    down = replace(FINE, broken={ProblemKind.LEARNER_DOWN: "It has died."})
    assert told(problems, FINE, 0.0) == []
    (change,) = problems.observe(down, 10.0)
    assert (change.began, change.at, change.problem.text, change.problem.since) == (True, 10.0, "It has died.", 10.0)
    assert told(problems, down, 20.0) == []
    assert told(problems, FINE, 20.0 + END_S - 1) == [], "it may come back"
    assert told(problems, down, 20.0 + END_S) == []
    assert told(problems, FINE, 20.0 + 2 * END_S - 1) == []
    assert told(problems, FINE, 20.0 + 2 * END_S) == [(ProblemKind.LEARNER_DOWN, False)]
    assert problems.active == ()


def test_no_nodes_is_a_problem_after_a_while_and_explains_why_the_learner_waits() -> None:
    problems = RunProblems(learner_idle_s=600.0, disk_free_bytes=1_000)
    for now in (0.0, 100.0, 299.0):
        assert told(problems, ALONE, now) == []
    assert told(problems, ALONE, 300.0) == [(ProblemKind.NO_NODES, True)]
    problems.observe(ALONE, 900.0)
    assert kinds(problems) == [ProblemKind.NO_NODES]
    assert problems.active[0].text.startswith("No node has been connected for 15 minutes. ")


@pytest.mark.parametrize(
    ("seen", "after_s", "what_to_do"),
    [
        (ALONE, 900.0, "Share the join command"),
        (replace(FINE, learner_waits=True), 900.0, "Check what each node does"),
        (replace(FINE, idle_share=0.9, idle_window_s=1.0), 900.0, "`echo-hub plan` says what would help"),
        (replace(FINE, disk_free_bytes=1), 0.0, "Free some space"),
        (replace(FINE, turned_away=10**6), 0.0, "`/metrics` says which"),
        (replace(FINE, quarantined=9), 0.0, "Inspect their checks"),
    ],
)
def test_each_problem_says_what_to_do(seen: RunObservation, after_s: float, what_to_do: str) -> None:
    problems = RunProblems(learner_idle_s=600.0, disk_free_bytes=1_000)
    problems.observe(replace(seen, turned_away=0, quarantined=0), 0.0)
    problems.observe(seen, after_s)
    assert what_to_do in problems.active[0].text


def test_a_learner_that_waits_long_is_idle() -> None:
    problems = RunProblems(learner_idle_s=600.0, disk_free_bytes=1_000)
    waits = replace(FINE, learner_waits=True)
    assert told(problems, waits, 0.0) == [] and told(problems, waits, 599.0) == []
    assert told(problems, waits, 600.0) == [(ProblemKind.LEARNER_IDLE, True)]
    assert "10 minutes, with 3 nodes" in problems.active[0].text


def test_an_idle_share_counts_over_time_in_which_there_were_nodes() -> None:
    problems = RunProblems(learner_idle_s=600.0, disk_free_bytes=1_000)
    idle = replace(FINE, idle_share=0.9, idle_window_s=400.0)
    problems.observe(ALONE, 0.0)
    assert told(problems, idle, 100.0) == [], "no node was connected for most of that time"
    assert told(problems, idle, 401.0) == [(ProblemKind.LEARNER_IDLE, True)]
    assert told(problems, replace(idle, idle_share=0.7), 402.0 + END_S) == [], "not better by a margin"
    better = replace(idle, idle_share=0.6)
    assert told(problems, better, 404.0 + 2 * END_S) == [(ProblemKind.LEARNER_IDLE, False)]


def test_a_disk_that_hovers_at_its_limit_is_one_problem() -> None:
    problems = RunProblems(learner_idle_s=600.0, disk_free_bytes=1_000)
    assert told(problems, replace(FINE, disk_free_bytes=999), 0.0) == [(ProblemKind.DISK, True)]
    for step in range(1, 20):
        assert told(problems, replace(FINE, disk_free_bytes=1_000 + step % 2), step * END_S) == []
    assert told(problems, replace(FINE, disk_free_bytes=1_300), 99 * END_S) == [(ProblemKind.DISK, False)]
    assert told(problems, replace(FINE, disk_free_bytes=None), 100 * END_S) == []


def test_a_reward_that_falls_is_a_problem() -> None:
    problems = RunProblems(learner_idle_s=600.0, disk_free_bytes=1_000)
    for step in range(1, 101):
        problems.rewards.add(step, 0.2 + 0.006 * step)
    assert told(problems, FINE, 0.0) == []
    for step in range(101, 140):
        problems.rewards.add(step, 0.2)
    assert told(problems, FINE, 10.0) == [(ProblemKind.REWARD_FELL, True)]
    assert "to 0.2 (up to step 139)" in problems.active[0].text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (FINE, replace(FINE, forged="Step 3: 2 of 8 groups were left out.")),
        (replace(FINE, quarantined=5), replace(FINE, quarantined=8)),
        (replace(FINE, turned_away=100), replace(FINE, turned_away=100 + 60 * 50)),
    ],
    ids=["forged", "quarantined", "turned away"],
)
def test_signs_of_an_attack_are_a_problem(before: RunObservation, after: RunObservation) -> None:
    problems = RunProblems(learner_idle_s=600.0, disk_free_bytes=1_000)
    assert told(problems, before, 0.0) == []
    assert told(problems, after, 30.0) == [(ProblemKind.ATTACK, True)]


def test_old_or_slow_events_are_no_attack() -> None:
    problems = RunProblems(learner_idle_s=600.0, disk_free_bytes=1_000)
    for hour in range(10):
        seen = replace(FINE, quarantined=hour, turned_away=hour * 60 * 60 * 40)
        assert told(problems, seen, hour * 3_600.0 + 1) == []


def test_at_the_runs_end_all_problems_end_but_the_disks() -> None:
    problems = RunProblems(learner_idle_s=600.0, disk_free_bytes=1_000)
    problems.observe(replace(FINE, disk_free_bytes=1, forged="x"), 0.0)
    over = RunObservation(is_over=True, lacks_nodes=True, learner_waits=True, disk_free_bytes=1)
    assert told(problems, over, 1.0) == [(ProblemKind.ATTACK, False)]
    assert kinds(problems) == [ProblemKind.DISK]
    assert told(problems, over, 9e9) == []


def test_zero_means_never() -> None:
    problems = RunProblems(learner_idle_s=0.0, disk_free_bytes=0)
    for now in range(0, 100_000, 1_000):
        assert told(problems, RunObservation(learner_waits=True, disk_free_bytes=1), float(now)) == []
