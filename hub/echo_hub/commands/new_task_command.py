"""`echo-hub new-task`: write a working example task and its test."""

from __future__ import annotations

import importlib.util
import keyword
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer

from echo_shared.errors import ConfigError

TASK: Final = '''"""A task: sort the letters of a word. Try it: PYTHONPATH=. echo-hub try-task python:NAME:make"""

import random
import string

from echo_hub.tasks.answers import extract_answer
from echo_hub.tasks.base import Problem


class Task:
    name = "NAME"  # Seeds the held-out problems: another name selects others.

    def __init__(self, letters: int) -> None:
        self.letters = letters

    def sample(self, seed: int) -> Problem:
        """Return a problem. The same seed must give the same problem on any machine: use no other randomness."""
        word = "".join(random.Random(seed).choices(string.ascii_lowercase, k=self.letters))
        return Problem(prompt=f"Sort the letters of {word}: ", metadata={"answer": "".join(sorted(word))})

    def score(self, problem: Problem, completion: str) -> float:
        """Return 0 to 1. Completions come from strangers: never execute one. An exception is an error, not a 0."""
        return float(extract_answer(completion) == problem.metadata["answer"])


def make(options: dict[str, int]) -> Task:
    """Create the task from task.options, such as {letters = 6}."""
    return Task(**{"letters": 5, **options})
'''

TEST: Final = '''"""Run it with pytest, in this directory."""

import pytest
from NAME import make

TASK = make({})


def test_the_same_seed_gives_the_same_problem() -> None:
    assert TASK.sample(7) == make({}).sample(7)
    assert len({TASK.sample(seed).prompt for seed in range(100)}) > 90


def test_the_right_answer_earns_the_highest_reward() -> None:
    problem = TASK.sample(7)
    answer = problem.metadata["answer"]
    assert TASK.score(problem, answer) == 1
    assert TASK.score(problem, f"I sort them. <answer>{answer}</answer>") == 1


@pytest.mark.parametrize("completion", ["", "zzzzz", "<answer></answer>", TASK.sample(7).prompt])
def test_what_is_no_answer_earns_nothing(completion: str) -> None:
    assert TASK.score(TASK.sample(7), completion) == 0


def test_options_change_the_problems() -> None:
    assert len(make({"letters": 8}).sample(7).metadata["answer"]) == 8
'''


def new_task(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the module: letters, digits and underscores.")],
    directory: Annotated[
        Path | None, typer.Option(help="Directory for NAME.py and test_NAME.py; default: NAME.")
    ] = None,
) -> None:
    """Write a working example task and its test, as a starting point for your own."""
    where = directory or Path(name)
    files = {where / f"{_checked(name)}.py": TASK, where / f"test_{name}.py": TEST}
    there = [str(path) for path in files if path.exists() or path.is_symlink()]
    if there:
        raise ConfigError(
            "The file exists already; nothing was written.", got=", ".join(there), do="Choose another name."
        )
    try:
        _write(where, {path.name: text.replace("NAME", name) for path, text in files.items()})
    except OSError as error:
        raise ConfigError(
            "The files cannot be written.", got=str(error), do="Name a directory that you may write to."
        ) from error
    typer.echo(f"Created {' and '.join(map(str, files))}.")
    typer.echo(f"Its test:  pytest {where}")
    typer.echo(f"Try it:    PYTHONPATH={where} echo-hub try-task python:{name}:make")
    typer.echo(f'In a run:  task.name = "python:{name}:make", and PYTHONPATH={where} for echo-hub serve')


def _checked(name: str) -> str:
    """Return `name` if it can be the name of a new module. Raises ConfigError if it is invalid or taken."""
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise ConfigError(
            "This is not a valid module name.", got=name, do="Use letters, digits and underscores: my_task"
        )
    if importlib.util.find_spec(name) is not None:
        raise ConfigError(
            "A module with this name exists, and Python would import that one.", got=name, do="Choose another name."
        )
    return name


def _write(where: Path, files: dict[str, str]) -> None:
    """Write all files completely in a temporary directory, then move them into place."""
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=where, prefix=".new-task-") as temporary:
        for name, text in files.items():
            (Path(temporary) / name).write_text(text, encoding="utf-8")
        for name in files:
            shutil.move(Path(temporary) / name, where / name)
