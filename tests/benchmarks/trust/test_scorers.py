"""Each completion is the number of a task and a text; a few go to real scorers in their processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.trust import scorers
from benchmarks.trust.scorers import FIRST, TEXTS, Told
from echo_hub.tasks.base import Problem

pytestmark = pytest.mark.timeout(300)


class _Length:
    name = "length"

    def __init__(self, factor: int) -> None:
        self._factor = factor

    def sample(self, seed: int) -> Problem:
        return Problem(prompt=f"{seed}=")

    def score(self, problem: Problem, completion: str) -> float:
        return float(self._factor * len(completion))


def test_a_number_says_which_task_scores_which_text() -> None:
    told = Told([_Length(1), _Length(2)])
    problem = told.sample(3)
    assert told.score(problem, str(FIRST - 1)) == 1.0, "the honest one"
    assert told.score(problem, str(FIRST + 7)) == len(TEXTS[7])
    assert told.score(problem, str(FIRST + len(TEXTS) + 7)) == 2 * len(TEXTS[7])


def test_the_texts_are_many_and_differ() -> None:
    assert len(set(TEXTS)) == len(TEXTS) >= 50


async def test_deadly_and_honest_completions_are_answered_one_by_one(tmp_path: Path) -> None:
    how = await scorers._attacked(tmp_path, ("arithmetic",), one_in=20)
    assert "{'scored': 4}" in how
