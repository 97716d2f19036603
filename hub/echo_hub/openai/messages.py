"""Chat messages and tools of requests, converted to the form that chat templates expect.

- `content` may be a list of text parts; templates get one text.
- Arguments of tool calls arrive as JSON in a string; templates get the object.
- A tool's answer gets the name of the tool that its `tool_call_id` called, because some templates write it.
- The role `developer` becomes `system`, which templates know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from echo_hub.openai.error_answers import UnsupportedOption
from echo_shared.files.strict_json import read_json

MOST_MESSAGES: Final = 2_048
MOST_TOOLS: Final = 128
MOST_ITEMS: Final = 4_096
"""Largest number of parts and tool calls in all messages together: they are read on the event loop."""
MOST_CALLS: Final = 128
"""Largest number of tool calls in one message."""

Name = Annotated[str, Field(min_length=1, max_length=256)]
_FIELDS: Final = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


class ContentPart(BaseModel):
    """One part of a message's content."""

    model_config = _FIELDS
    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def said(self) -> str:
        """The part's text. Raises UnsupportedOption for images, audio and files."""
        match self.type:
            case "text" | "input_text" | "output_text":
                return self.text or ""
            case "refusal":
                return self.refusal or ""
            case _:
                raise UnsupportedOption(
                    "messages", got=f"a part of the type {self.type[:100]!r}", do="This model reads text only."
                )


class CalledFunction(BaseModel):
    """Function of a tool call in an earlier reply."""

    model_config = _FIELDS
    name: Name
    arguments: str | dict[str, Any] = ""

    @property
    def for_template(self) -> dict[str, Any] | str:
        """Return the arguments as an object. Arguments that are not a JSON object stay text."""
        if isinstance(self.arguments, dict):
            return self.arguments
        try:
            found = read_json((self.arguments or "{}").encode())
        except ValueError:  # The model wrote them; the template shows them unchanged.
            return self.arguments
        return found if isinstance(found, dict) else self.arguments


class EarlierCall(BaseModel):
    """Tool call in an earlier reply."""

    model_config = _FIELDS
    id: Annotated[str, Field(max_length=256)] = ""
    function: CalledFunction


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = _FIELDS
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(max_length=MOST_ITEMS, fail_fast=True)] | None = None
    name: Name | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[EarlierCall], Field(max_length=MOST_CALLS, fail_fast=True)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.said for part in self.content)
        return self.content or ""


class ToolFunction(BaseModel):
    model_config = _FIELDS
    name: Name


class ToolDefinition(BaseModel):
    """Checks a tool. Templates get it as it was sent, because the order of its keys decides the prompt's tokens."""

    model_config = _FIELDS
    type: Literal["function"]
    function: ToolFunction


def _checked_tool(tool: dict[str, Any]) -> dict[str, Any]:
    ToolDefinition.model_validate(tool)
    return tool


Tool = Annotated[dict[str, Any], AfterValidator(_checked_tool)]


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages as chat templates expect them. Raises Refusal for content that is not text."""
    names: dict[str, str] = {}
    found: list[dict[str, Any]] = []
    for message in messages:
        one: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": message.text,
        }
        if message.reasoning_content is not None:
            one["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            names |= {call.id: call.function.name for call in message.tool_calls}
            one["tool_calls"] = [_call(call) for call in message.tool_calls]
        if message.tool_call_id is not None:
            one["tool_call_id"] = message.tool_call_id
        name = message.name or names.get(message.tool_call_id or "")
        if name:
            one["name"] = name
        found.append(one)
    return found


def _call(call: EarlierCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": call.function.for_template},
    }
