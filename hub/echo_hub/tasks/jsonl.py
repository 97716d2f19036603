"""Problems from a JSON Lines file. Each line has a `prompt` and an `answer`; other keys are kept as metadata.

Every line is checked before the first use, but only its offset is kept, 8 bytes per line. Problems are read from the
file when needed. If the file changes during a run, an error is raised. If it changes between two starts of a run, its
`content_hash` changes.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from echo_hub.tasks.answers import extract_answer
from echo_hub.tasks.base import Problem
from echo_hub.tasks.math_answers import Understanding, Verdict, judge, understanding
from echo_hub.tasks.math_forms import Form
from echo_hub.tasks.options import TaskOptions
from echo_shared.errors import ConfigError
from echo_shared.files.strict_json import read_json

_SHOWN_CHARACTERS: Final = 200
_READ_LINES: Final = 1_000
"""Number of lines whose reference answers are parsed before a run, to warn of unreadable ones. Parsing takes about a
millisecond per line."""
_NAMED_LINES: Final = 5
FORM: Final = "answer_form"
"""Optional key of a line, for the form that the line's answer must have."""


class JsonlOptions(TaskOptions):
    """Options that name the files, and select how answers are compared."""

    path: Annotated[str, Field(min_length=1)]
    """Path of the file. `~` means the home directory."""
    heldout_path: str = ""
    """File of problems for evaluation only, used in order. Without this file, held-out problems are drawn from
    `path`."""
    answer: Literal["math", "exact"] = "math"
    """math: answers must be equal as mathematics. exact: answers must have equal text."""


def _as_text(problem: Problem, completion: str) -> Verdict:
    expected: str = problem.metadata["answer"]
    return Verdict.RIGHT if extract_answer(completion) == expected.strip() else Verdict.WRONG


def _as_mathematics(problem: Problem, completion: str) -> Verdict:
    form = problem.metadata.get(FORM)
    expected = problem.metadata["answer"]
    return judge(completion, expected, question=problem.prompt, form=Form(form) if form else None)


_GRADERS: Final[Mapping[str, Callable[[Problem, str], Verdict]]] = {"math": _as_mathematics, "exact": _as_text}


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlFile:
    """A file whose lines have all been checked."""

    path: Path
    starts: array[int]
    """Byte offset in the file of each line that is not blank."""
    content_hash: str
    stamp: tuple[int, int]

    @classmethod
    def open(cls, name: str) -> JsonlFile:
        """Check every line. Raises ConfigError if the file cannot be read, has an invalid line, or has no problem."""
        path = Path(name).expanduser()
        starts, position, digest = array("q"), 0, hashlib.sha256()
        try:
            with path.open("rb") as file:
                stamp = _stamp(file.fileno())
                for number, line in enumerate(file, start=1):
                    if line.removeprefix(BOM_UTF8).strip():
                        _problem(line, place=f"{path}, line {number}")
                        starts.append(position)
                    digest.update(line)
                    position += len(line)
        except OSError as error:
            raise ConfigError(
                "The file of problems cannot be read.", got=str(error), do="Name another file."
            ) from error
        if not starts:
            raise ConfigError("The file of problems is empty.", got=str(path), do="Give it a line for each problem.")
        return cls(path=path, starts=starts, content_hash=digest.hexdigest(), stamp=stamp)

    def __getitem__(self, number: int) -> Problem:
        """Return problem `number` of the file. Raises ConfigError if the file has changed since the check."""
        try:
            with self.path.open("rb") as file:
                if _stamp(file.fileno()) == self.stamp:
                    file.seek(self.starts[number])
                    return _problem(file.readline(), place=f"{self.path}, problem {number + 1}")
        except OSError as error:
            raise ConfigError("The file of problems cannot be read any more.", got=str(error)) from error
        raise ConfigError(
            "The file of problems has changed while it is used.",
            got=str(self.path),
            do="Put back what was there. New problems go into a new file, for a new run.",
        )

    def __len__(self) -> int:
        return len(self.starts)

    def numbered(self, most: int) -> Iterator[tuple[int, Problem]]:
        """Yield (line number, problem) for the first `most` lines."""
        with self.path.open("rb") as file:
            for number, line in enumerate(islice(file, most), start=1):
                if line.removeprefix(BOM_UTF8).strip():
                    yield number, _problem(line, place=f"{self.path}, line {number}")


def _stamp(descriptor: int) -> tuple[int, int]:
    state = os.fstat(descriptor)
    return state.st_size, state.st_mtime_ns


def _problem(line: bytes, *, place: str) -> Problem:
    """Parse one line. Raises ConfigError, with `place`, if the line is not a valid problem."""
    try:
        content = read_json(line)
    except ValueError as error:
        raise _bad_line(place, line, f"cannot be used: {error}") from error
    if not isinstance(content, dict):
        raise _bad_line(place, line, "is not a map")
    prompt, answer = content.pop("prompt", None), content.pop("answer", None)
    if not isinstance(prompt, str) or not prompt.strip():
        raise _bad_line(place, line, "has no text as prompt")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise _bad_line(place, line, "has neither text nor a number as answer")
    if content.get(FORM) not in (None, *Form):
        raise _bad_line(place, line, f"has an {FORM} that is none of {', '.join(Form)}")
    # Python writes 0.00001 as 1e-05, a form that files do not use.
    text = format(Decimal(repr(answer)), "f") if isinstance(answer, float) else str(answer)
    return Problem(prompt=prompt, metadata={**content, "answer": text})


def _bad_line(place: str, line: bytes, what: str) -> ConfigError:
    # UTF-8 has at most 4 bytes per character, so the start of a long line suffices.
    text = line[: 4 * _SHOWN_CHARACTERS + 4].decode(errors="replace").strip()
    shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    return ConfigError(
        f"A line of the file of problems {what}.",
        got=f"{place}: {shown}",
        do='Every line must look like {"prompt": "What is 1 + 1?", "answer": "2"}.',
    )


class JsonlTask:
    """The problems of a file. The reward is 1 for a right answer, else 0."""

    name = "jsonl"

    def __init__(self, options: JsonlOptions, *, problems: JsonlFile, heldout: JsonlFile | None) -> None:
        self._problems = problems
        self._heldout = heldout
        self._is_of_mathematics = options.answer == "math"
        self._judged = _GRADERS[options.answer]

    @property
    def num_problems(self) -> int:
        return len(self._problems)

    @property
    def num_heldout(self) -> int:
        return len(self._heldout or ())

    @property
    def content_hash(self) -> str:
        return "+".join(file.content_hash for file in (self._problems, self._heldout) if file is not None)

    def sample(self, seed: int) -> Problem:
        return self.problem(seed % len(self._problems))

    def problem(self, number: int) -> Problem:
        return self._problems[number]

    def heldout(self, number: int) -> Problem:
        assert self._heldout is not None, "num_heldout is 0"
        return self._heldout[number]

    def score(self, problem: Problem, completion: str) -> float:
        return float(self._judged(problem, completion) is Verdict.RIGHT)

    def verdict(self, problem: Problem, completion: str) -> str:
        return self._judged(problem, completion).value

    def reading(self, problem: Problem) -> str:
        return understanding(problem.metadata["answer"]).value if self._is_of_mathematics else "text"

    def notes(self) -> tuple[str, ...]:
        files = (self._problems, self._heldout) if self._is_of_mathematics else ()
        return tuple(note for file in files if file is not None and (note := _note(file)))


def _note(file: JsonlFile) -> str:
    """Return a sentence that names the first lines whose reference answers cannot be parsed; "" if all can."""
    found = [
        number
        for number, problem in file.numbered(_READ_LINES)
        if understanding(problem.metadata["answer"]) is Understanding.TEXT
    ]
    if not found:
        return ""
    lines = ", ".join(map(str, found[:_NAMED_LINES])) + (", ..." if len(found) > _NAMED_LINES else "")
    return (
        f"{len(found)} of the first {_READ_LINES:,} lines of {file.path} have a reference answer that is not "
        f"understood as mathematics, so only the same text is right: line {lines}."
    )


def make_jsonl(options: Mapping[str, Any]) -> JsonlTask:
    """Create the task. Raises ConfigError for an unknown or invalid option, and for an invalid file."""
    chosen = JsonlOptions.read("jsonl", options)
    heldout = JsonlFile.open(chosen.heldout_path) if chosen.heldout_path else None
    return JsonlTask(chosen, problems=JsonlFile.open(chosen.path), heldout=heldout)
