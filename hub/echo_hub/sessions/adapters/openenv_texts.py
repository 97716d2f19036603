"""Text of the model's reply to actions of an OpenEnv environment, and observations to text. Pure functions.

    form "field", action = "message"   hello                            {"message": "hello"}
    form "json"                        <answer>{"column": 3}</answer>   {"column": 3}
    form "tools"                       <tool_call>{"name": "say", ...   {"type": "call_tool", "tool_name": "say", ...

A reply that gives no action is the model's mistake, never an exception: models write anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from echo_hub.sessions.adapters.openenv_options import PLACEHOLDER, OpenEnvOptions
from echo_hub.sessions.adapters.openenv_wire import ServerError, StrangeAnswerError
from echo_hub.tasks.answers import extract_answer
from echo_hub.tasks.environments.base import Message
from echo_hub.tasks.tool_calls import BadCall, tool_calls

EMPTY: Final = "(empty)"
"""Stands for an observation without text: chat templates refuse or drop an empty message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTry:
    """One action from a reply of the model. With `mistake`, the reply has no valid action: the model is told, and the
    server gets nothing."""

    action: Mapping[str, Any] | None = None
    mistake: str = ""
    """Sentence that tells the model what is wrong with its reply; "" if nothing is."""
    tool: str = ""
    """Name of the called tool; "" if the reply contains no tool call."""
    number: int = 0
    """Number of the tool call in its reply, from 0."""

    def message(self, text: str) -> Message:
        """Return the answer to this action as a chat message: with the role "tool" if a tool was called, else
        "user"."""
        said = readable(text)
        if not self.tool:
            return Message(text=said)
        return Message(text=said, role="tool", name=self.tool, tool_call_id=f"call{self.number:05}")


def attempts(reply: str, options: OpenEnvOptions) -> Sequence[ActionTry]:
    """Return the actions of a reply, in order. Empty if `form` is "tools" and the reply calls no tool."""
    match options.action_form:
        case "field":
            return [ActionTry(action={**options.constants, **_nested(options.action, extract_answer(reply))})]
        case "json":
            return [_sendable(_json_action(extract_answer(reply), options))]
        case "tools":
            return [_sendable(_call(call, number)) for number, call in enumerate(tool_calls(reply))]


def observation_text(observation: Mapping[str, Any], options: OpenEnvOptions) -> str:
    """Return what the model reads of an observation; "" if that is empty. Raises StrangeAnswerError if the field that
    `observation` names is missing."""
    if not options.observation:
        is_call = options.action_form == "tools" and {"result", "error"} <= observation.keys()
        return _tool_text(observation) if is_call else _text(observation)
    value: Any = observation
    for name in options.observation.split("."):
        if not isinstance(value, Mapping) or name not in value:
            there = ", ".join(map(str, observation)) or "none"
            raise StrangeAnswerError(
                f"The observation has no field {options.observation!r} (task.options.observation); its fields: {there}."
            )
        value = value[name]
    return _text(value)


def prompt_text(observation: Mapping[str, Any] | None, options: OpenEnvOptions) -> str:
    """Return the first prompt. `observation` is the one after the reset; None if the prompt does not show it."""
    if observation is None:
        return options.prompt
    return options.prompt.replace(PLACEHOLDER, readable(observation_text(observation, options)))


def readable(text: str) -> str:
    """Return the text in a form that any tokenizer takes: not empty, and without lone surrogates (halves of
    characters)."""
    return text.encode("utf-8", "replace").decode() or EMPTY


def mistake_text(error: ServerError) -> str:
    """Return what the model reads after the server has refused its action."""
    return f"Error: {'; '.join((error.message, *error.problems)) or error.code}"


def tools_of(observation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools in the answer to `list_tools`, as definitions for task.options.tools.

    Defaults of null are left out, because the settings file has no null.
    """
    listed = observation.get("tools")
    found: list[dict[str, Any]] = _without_null(
        {
            "name": tool["name"],
            "description": tool.get("description", ""),
            "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
        }
        for tool in (listed if isinstance(listed, list) else [])
        if isinstance(tool, Mapping) and isinstance(tool.get("name"), str)
    )
    return found


def _without_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_null(one) for name, one in value.items() if one is not None}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_without_null(one) for one in value if one is not None]
    return value


def _nested(path: str, value: str) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    return {first: _nested(rest, value) if rest else value}


def _sendable(attempt: ActionTry) -> ActionTry:
    """Return the attempt. If its action holds a number that JSON cannot hold, such as 1e999, return a mistake
    instead."""
    try:
        json.dumps(attempt.action, allow_nan=False)
    except (ValueError, RecursionError) as error:
        return replace(attempt, action=None, mistake=f"Error: The action is not valid JSON: {error}.")
    return attempt


def _json_action(answer: str, options: OpenEnvOptions) -> ActionTry:
    try:
        action = json.loads(answer, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        return ActionTry(mistake=f"Error: The answer is not JSON: {error}.")
    if not isinstance(action, dict):
        return ActionTry(mistake="Error: The answer is not a JSON object.")
    return ActionTry(action={**action, **options.constants})


def _call(call: Any, number: int) -> ActionTry:
    if isinstance(call, BadCall):
        return ActionTry(mistake=f"Error: {call.problem}", tool="error", number=number)
    action = {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
    return ActionTry(action=action, tool=call.name, number=number)


def _tool_text(observation: Mapping[str, Any]) -> str:
    """Return a tool's answer: its error, the texts of its result, or the result as JSON."""
    error, result = observation["error"], observation["result"]
    if error:
        said = error.get("message") if isinstance(error, Mapping) else error
        return f"Error: {said}"
    if not isinstance(result, Mapping):
        return _text(result)
    content = result.get("content")
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    return "\n".join(texts) if texts else _text(result.get("data", result))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")
