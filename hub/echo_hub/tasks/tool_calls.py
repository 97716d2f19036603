"""Calls of tools in a reply's text, as Hermes, Qwen2.5 and Qwen3 write them: `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>`.

Replies are a model's, and in a swarm a stranger's: whatever is no call is a `BadCall`, to be answered as the tool's
error, and never an exception.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
MOST_CALLS: Final = 16
"""Of one reply; those behind them are one `BadCall` together."""
MOST_CHARACTERS: Final = 65_536
"""Of one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool's name and what it is given; whether there is such a tool, and takes that, is for the task to say."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadCall:
    """What stands where a call should."""

    problem: str
    """A sentence for the model to read."""


def tool_calls(text: str) -> list[ToolCall | BadCall]:
    """All calls in a reply, in order; none in a reply that calls no tool. In time that grows with the length alone."""
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


def _call(text: str) -> ToolCall | BadCall:
    if len(text) > MOST_CHARACTERS:
        return BadCall(problem=f"The call is longer than {MOST_CHARACTERS} characters.")
    try:
        call = json.loads(text, parse_constant=_refused)
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if isinstance(arguments, str):  # As OpenAI's API has it.
            arguments = json.loads(arguments, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        return BadCall(problem=f"The call is no JSON: {error}.")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        return BadCall(problem='A call is {"name": the tool\'s name, "arguments": {...}}.')
    return ToolCall(name=call["name"], arguments=arguments)


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no number")
