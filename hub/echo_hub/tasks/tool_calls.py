"""Parse tool calls in a reply, in the format of Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>`.

Replies come from models on untrusted nodes. So an invalid call raises no exception. It becomes a `BadCall`, and the
task answers it with an error message of the tool.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from echo_shared.records.rollout import CallMade

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
MOST_CALLS: Final = 16
"""Largest number of parsed calls in a reply. All further calls together become one `BadCall`."""
MOST_CHARACTERS: Final = 65_536
"""Largest length of one call, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool's name and arguments, as the model wrote them. The task must check both."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadCall:
    """A call that cannot be parsed."""

    problem: str
    """Sentence that tells the model what is wrong."""


def tool_calls(text: str) -> list[ToolCall | BadCall]:
    """Return all calls in a reply, in order. Empty if there are none. Runs in linear time."""
    found: list[ToolCall | BadCall] = []
    place = text.find(OPEN)
    while place >= 0:
        if len(found) == MOST_CALLS:
            return [*found, BadCall(problem=f"No more than {MOST_CALLS} calls at once.")]
        place += len(OPEN)
        end = text.find(CLOSE, place)
        if end < 0:
            return [*found, BadCall(problem=f"The call is not closed by {CLOSE}.")]
        found.append(_call(text[place:end]))
        place = text.find(OPEN, end + len(CLOSE))
    return found


def calls_made(text: str) -> tuple[CallMade, ...]:
    """Return all calls in a reply, as records for people and for JSON."""
    return tuple(
        CallMade(name=call.name, arguments=json.dumps(call.arguments, ensure_ascii=False))
        if isinstance(call, ToolCall)
        else CallMade(name="", arguments="", problem=call.problem)
        for call in tool_calls(text)
    )


def _call(text: str) -> ToolCall | BadCall:
    if len(text) > MOST_CHARACTERS:
        return BadCall(problem=f"The call is longer than {MOST_CHARACTERS} characters.")
    try:
        call = json.loads(text, parse_constant=_refused)
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if isinstance(arguments, str):  # OpenAI's API encodes arguments as a string.
            arguments = json.loads(arguments, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        return BadCall(problem=f"The call is not JSON: {error}.")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        return BadCall(problem='A call is {"name": the tool\'s name, "arguments": {...}}.')
    return ToolCall(name=call["name"], arguments=arguments)


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")
