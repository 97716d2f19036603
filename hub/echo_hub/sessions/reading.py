"""Answers of a session's program, read from JSON lines. The program runs foreign code, so each field is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import (
    Ending,
    EnvironmentAway,
    EpisodeRefused,
    NoSlot,
    Observation,
    Opening,
    SessionGone,
)
from echo_shared.errors import ConfigError, EchoError
from echo_shared.wire.messages.fields import printable_line

LONGEST_LINE: Final = 2**24
"""Longest line of an answer, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramAnswer:
    """One JSON line from a session's program. Exactly one of its fields is set."""

    __pydantic_config__ = ConfigDict(strict=True, allow_inf_nan=False)

    problem: Problem | None = None
    opening: Opening | None = None
    observation: Observation | None = None
    ending: Ending | None = None
    closed: bool = False
    error: Annotated[str | None, Field(max_length=10_000)] = None
    code: str = ""
    got: Annotated[str | None, Field(max_length=10_000)] = None
    do: Annotated[str | None, Field(max_length=10_000)] = None
    most: Annotated[int | None, Field(ge=0, le=1_000_000)] = None
    ended: Annotated[str | None, Field(max_length=10_000)] = None
    """Why the session has ended, in its last line."""


_ANSWERS: Final = TypeAdapter(ProgramAnswer)


def read_answer(line: bytes) -> ProgramAnswer:
    """Parse `line`, and return the answer in it.

    Raises SessionGone if the session has ended or failed, or if the line is not an answer; EnvironmentAway, NoSlot,
    EpisodeRefused and ConfigError if the adapter says so.
    """
    try:
        answer = _ANSWERS.validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise SessionGone(
            "The session's program gave no valid answer.",
            got=f"{place}: {first['msg']}; {printable_line(line[:200].decode(errors='replace'))}",
        ) from None
    if answer.ended is not None:
        raise SessionGone(printable_line(answer.ended) or "The session has ended.")
    if answer.error is not None:
        raise _failure(answer)
    return answer


def _failure(answer: ProgramAnswer) -> EchoError:
    text = printable_line(answer.error or "")
    got, do = (None if part is None else printable_line(part) for part in (answer.got, answer.do))
    match answer.code:
        case "environment_away":
            return EnvironmentAway(text, got=got, do=do)
        case "no_slot":
            return NoSlot(text, most=answer.most, got=got, do=do)
        case "episode_refused":
            return EpisodeRefused(text, got=got, do=do)
        case "config":
            return ConfigError(text, got=got, do=do)
    return SessionGone(text, got=got, do=do)


def problem_fields(problem: Problem) -> Mapping[str, Any]:
    """Return a problem's fields as JSON values."""
    return {
        "prompt": problem.prompt,
        "metadata": dict(problem.metadata),
        "prompt_ids": list(problem.prompt_ids),
    }
