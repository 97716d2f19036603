from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable

import pytest

from echo_hub.tasks.answers import extract_answer
from echo_hub.tasks.environments.base import Ending, ReplayedEnvironment
from echo_hub.tasks.registry import make_task
from scripts.small_base.lessons import (
    AGAIN,
    KNIGHTS,
    SOKOBAN,
    Knights,
    Lesson,
    Sokoban,
    Statements,
    reminders,
    worked_product,
    worked_sum,
)

Teacher = Callable[[random.Random, float], Lesson]


def worked(prompt: str, completion: str) -> bool:
    left, sign, right = re.fullmatch(r"(\d+)([+*])(\d+):", prompt).groups()  # type: ignore[union-attr]
    expected = int(left) + int(right) if sign == "+" else int(left) * int(right)
    return extract_answer(completion) == str(expected)


@pytest.mark.parametrize("teacher", [worked_sum, worked_product])
def test_a_careful_teacher_is_right_and_a_careless_one_continues_from_its_mistakes(teacher: Teacher) -> None:
    rng = random.Random(1)
    assert all(worked(lesson.prompt, lesson.completion) for lesson in (teacher(rng, 0.0) for _ in range(300)))
    careless = [teacher(rng, 0.5) for _ in range(300)]
    right = sum(worked(lesson.prompt, lesson.completion) for lesson in careless)
    assert 30 < right < 270
    lengths = [len(lesson.completion) for lesson in careless]
    assert max(lengths) > 5 * min(lengths)


def test_each_working_step_shows_the_remaining_digits_of_both_terms() -> None:
    class First(random.Random):
        def randrange(self, *_: int) -> int:  # type: ignore[override]
            return 95

    lesson = worked_sum(First(), 0.0)
    assert lesson == Lesson("95+95:", "\n95+95+0=10\n9+9+1=19\n<answer>190</answer>")
    assert worked_sum(First(), 1.0).completion == "\n95+95+0=10\n9+9+0=18\n<answer>80</answer>"


def test_a_carry_is_forgotten_most_where_a_column_comes_to_a_round_ten() -> None:
    rng = random.Random(1)
    forgotten: dict[bool, list[bool]] = {True: [], False: []}
    for lines in (worked_sum(rng, 0.15).completion.splitlines() for _ in range(2_000)):
        for line, after in itertools.pairwise(lines[1:]):
            if "=1" in line and not after.startswith("<"):
                forgotten[line.endswith("=10")].append("+0=" in after)
    assert 0.5 < sum(forgotten[True]) / len(forgotten[True]) < 0.7
    assert 0.1 < sum(forgotten[False]) / len(forgotten[False]) < 0.2


def test_cases_of_knights_lead_to_the_answer_that_the_dataset_pays() -> None:
    task = make_task("reasoning-gym:knights_knaves", dict(KNIGHTS))
    assert not isinstance(task, ReplayedEnvironment)
    teacher = Knights()
    earned = []
    for seed in range(60):
        problem = task.sample(random.Random(seed).getrandbits(64))
        lesson = teacher(random.Random(seed), 0.0)
        assert lesson.prompt == problem.prompt and lesson.reads
        assert task.score(problem, lesson.completion) == 1.0
        earned.append(task.score(problem, teacher(random.Random(seed), 0.3).completion))
    assert 10 < earned.count(1.0) < 55


def test_parts_of_puzzles_are_read_as_whole_ones_are() -> None:
    whole, parts = Knights(), Statements()
    counts = set()
    for seed in range(200):
        puzzle, part = whole(random.Random(seed), 0.0), parts(random.Random(seed), 0.0)
        met, said = re.fullmatch(r"(.*?\.)( .*)", part.prompt).groups()  # type: ignore[union-attr]
        assert met in puzzle.prompt and said in puzzle.prompt and part.reads
        lines = part.completion.splitlines()
        assert set(lines) < set(puzzle.completion.splitlines())
        spoken = [line for line in lines if line[1:2] == ":"]
        counts.add(len(spoken))
        assert all(re.search(rf"{name}\b", said) for line in spoken for name in re.findall("[A-Z][a-z]+", line))
    assert counts == {1, 2}


def test_repeated_facts_come_from_the_prompt() -> None:
    rng = random.Random(0)
    for _ in range(50):
        lesson = reminders(rng, 0.0)
        said = re.findall(r" [A-Z][a-z]+(?: is a [a-z]+|\d)", lesson.prompt)
        again = re.findall(r" [A-Z][a-z]+(?: is a [a-z]+|\d)", lesson.completion)
        assert "".join(said) == lesson.prompt and f"\n{''.join(again)}" == lesson.completion
        assert len(again) == AGAIN and set(again) <= set(said)


def test_boards_are_solved_from_any_intermediate_state() -> None:
    environment = make_task("environment:sokoban", dict(SOKOBAN))
    assert isinstance(environment, ReplayedEnvironment)
    teacher = Sokoban()
    rounds = set()
    for seed in range(60):
        lesson = teacher(random.Random(seed), 0.0)
        problem = environment.sample(random.Random(seed).getrandbits(64))
        said = re.findall(r":([UDLR]*)<eos>", lesson.prompt)
        rounds.add(len(said))
        assert lesson.prompt.startswith(problem.prompt)
        if len(lesson.completion) < 8:
            assert environment.respond(problem, [*said, lesson.completion]) == Ending(reward=1.0)
    assert rounds == {0, 1, 2}
