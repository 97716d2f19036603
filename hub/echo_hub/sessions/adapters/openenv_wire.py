"""Messages of an OpenEnv server's WebSocket, as JSON texts.

    out  {"type": "reset", "data": {"seed": 7}}, {"type": "step", "data": ACTION}, {"type": "state"}, {"type": "close"}
    in   {"type": "observation", "data": {"observation": {...}, "reward": 0.5, "done": false}}
         {"type": "state", "data": {"step_count": 3, "episode_id": "..."}}
         {"type": "error", "data": {"message": "...", "code": "EXECUTION_ERROR"}}

The server is a program of the operator, but its texts are checked like untrusted input. This module does no I/O.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

CAPACITY_REACHED: Final = "CAPACITY_REACHED"
VALIDATION_ERROR: Final = "VALIDATION_ERROR"
MOST_SHOWN: Final = 300
"""Largest number of characters of a server's text that an error shows."""


class StrangeAnswerError(Exception):
    """The server's answer has no valid form. The exception's text is a sentence that says what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """The server's answer to a reset or to a step: an observation and a reward."""

    observation: Mapping[str, Any]
    reward: float
    """Reward of this step; 0 if the server gave none."""
    done: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """The server's answer to a request for the session's state."""

    step_count: int | None
    """Number of steps since the last reset; None if the server does not give it."""
    episode_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerError:
    """An error that the server reports, with its code and message."""

    code: str
    message: str
    problems: tuple[str, ...] = ()
    """Sentences about invalid fields of an action."""
    most_sessions: int | None = None
    """Number of sessions that the server allows, if it says so."""

    @property
    def text(self) -> str:
        said = "; ".join((self.message, *self.problems)) or "no message"
        return f"{self.code}: {shortened(said)}"


ServerAnswer = Stepped | ServerState | ServerError


def reset_message(arguments: Mapping[str, Any]) -> str:
    return _encoded({"type": "reset", "data": dict(arguments)})


def step_message(action: Mapping[str, Any]) -> str:
    return _encoded({"type": "step", "data": dict(action)})


def state_message() -> str:
    return _encoded({"type": "state"})


def close_message() -> str:
    return _encoded({"type": "close"})


def read_answer(text: str | bytes) -> ServerAnswer:
    """Return the server's answer. Raises StrangeAnswerError if it has no valid form."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StrangeAnswerError(f"The answer is not JSON ({error}): {_excerpt(text)}.") from error
    kind = message.get("type") if isinstance(message, dict) else None
    data = message.get("data") if isinstance(message, dict) else None
    if not isinstance(data, dict) or kind not in ("observation", "state", "error"):
        raise StrangeAnswerError(f"The answer is not an observation, state or error: {_excerpt(text)}.")
    if kind == "error":
        return _error(data)
    return _stepped(data) if kind == "observation" else _state(data)


def read_stepped(data: object) -> Stepped:
    """Return the observation in the body of an answer to `POST /reset`. Raises StrangeAnswerError."""
    if not isinstance(data, dict):
        raise StrangeAnswerError(f"The answer is not an observation: {_excerpt(repr(data))}.")
    return _stepped(data)


def shortened(text: str) -> str:
    """Return a server's text on one line, for an error text. A long text loses its middle."""
    line = " ".join(text.split())
    return line if len(line) <= MOST_SHOWN else f"{line[: MOST_SHOWN // 2]} ... {line[-MOST_SHOWN // 2 :]}"


def _stepped(data: Mapping[str, Any]) -> Stepped:
    observation = data.get("observation")
    if not isinstance(observation, dict):
        raise StrangeAnswerError(f"The observation is not a JSON object: {reprlib.repr(observation)}.")
    done = data.get("done", False)
    if not isinstance(done, bool):
        raise StrangeAnswerError(f"`done` is not true or false: {reprlib.repr(done)}.")
    reward = data.get("reward")
    if reward is not None and not isinstance(reward, int | float):
        raise StrangeAnswerError(f"The reward is not a number: {reprlib.repr(reward)}.")
    # float() fails for integers beyond its range.
    number = 0.0 if reward is None else float(reward) if abs(reward) <= 1e300 else math.nan
    if not math.isfinite(number):
        raise StrangeAnswerError(f"The reward is not a finite number: {reprlib.repr(reward)}.")
    return Stepped(observation=observation, reward=number, done=done)


def _state(data: Mapping[str, Any]) -> ServerState:
    steps, episode = data.get("step_count"), data.get("episode_id")
    is_number = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 0
    return ServerState(step_count=steps if is_number else None, episode_id=episode if isinstance(episode, str) else "")


def _error(data: Mapping[str, Any]) -> ServerError:
    code, message, most = data.get("code"), data.get("message"), data.get("max_sessions")
    listed = data.get("errors")
    is_number = isinstance(most, int) and not isinstance(most, bool) and most > 0
    return ServerError(
        code=shortened(code) if isinstance(code, str) and code else "an error without a code",
        message=message if isinstance(message, str) else "",
        problems=tuple(_problem(one) for one in listed[:8]) if isinstance(listed, list) else (),
        most_sessions=most if is_number else None,
    )


def _problem(one: object) -> str:
    """Return the text of one of Pydantic's errors, such as `message: Field required`."""
    if not isinstance(one, dict):
        return shortened(str(one))
    place = one.get("loc")
    where = ".".join(map(str, place)) if isinstance(place, list) else ""
    return shortened(f"{where}: {one.get('msg', 'not valid')}" if where else str(one.get("msg", "not valid")))


def _encoded(message: Mapping[str, Any]) -> str:
    return json.dumps(message, allow_nan=False)


def _excerpt(text: str | bytes) -> str:
    shown = text if isinstance(text, str) else text.decode("utf-8", "replace")
    return repr(shortened(shown)) if shown else "an empty text"
