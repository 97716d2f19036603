"""Tool calls in a reply that grows, in the format of Hermes and Qwen (`echo_hub.tasks.tool_calls`).

Text before the first call may be shown at once. From the first `<tool_call>` on, everything is held until the reply is
over, because a call that cannot be parsed makes the whole reply plain text. Calls within a block of reasoning do not
count.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from echo_hub.run import thinking
from echo_hub.tasks.tool_calls import OPEN, BadCall, ToolCall, tool_calls

_LONGEST_MARK: Final = max(map(len, (OPEN, thinking.OPEN, thinking.CLOSE)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCall:
    """A tool call as the OpenAI API answers it."""

    call_id: str
    name: str
    arguments: str
    """JSON text."""

    def body(self) -> dict[str, Any]:
        return {
            "id": self.call_id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class ReplyCalls:
    """Finds the tool calls in one reply while it grows. `in_thought`: the prompt ended within a block of reasoning."""

    def __init__(self, *, in_thought: bool = False) -> None:
        self._in_thought = in_thought
        self._text = ""
        self._searched = 0
        """Number of characters of the reply that were already searched for tags."""
        self._call_at: int | None = None
        """Position of the first tool call outside of reasoning; None if there is none yet."""
        self._num_shown = 0

    def add(self, text: str) -> str:
        """Append new text of the reply. Return the content that can be shown now and was not shown before."""
        self._text += text
        self._search()
        end = self._call_at
        if end is None:
            end = len(self._text) if self._in_thought else len(self._text) - _held_back(self._text)
        # Spaces before a call are no part of the content.
        shown = self._text[self._num_shown : end] if self._in_thought else self._text[self._num_shown : end].rstrip()
        self._num_shown += len(shown)
        return shown

    def end(self) -> tuple[str, tuple[ReadCall, ...]]:
        """Return the rest of the content, and the calls. Without valid calls, the rest is all text."""
        found: Sequence[ToolCall | BadCall] = ()
        if self._call_at is not None:
            found = tool_calls(self._text[self._call_at :])
        calls = [call for call in found if isinstance(call, ToolCall)]
        if not calls or len(calls) < len(found):
            return self._text[self._num_shown :], ()
        return "", tuple(
            ReadCall(
                call_id=f"call_{secrets.token_hex(12)}",
                name=call.name,
                arguments=json.dumps(call.arguments, ensure_ascii=False),
            )
            for call in calls
        )

    def _search(self) -> None:
        """Look for tags in the text that has come since the last search."""
        while self._call_at is None:
            tags = (thinking.CLOSE,) if self._in_thought else (OPEN, thinking.OPEN)
            places = {place: tag for tag in tags if (place := self._text.find(tag, self._searched)) >= 0}
            if not places:
                self._searched = max(self._searched, len(self._text) - _LONGEST_MARK + 1)
                return
            place = min(places)
            if places[place] == OPEN:
                self._call_at = place
                return
            self._in_thought = not self._in_thought
            self._searched = place + len(places[place])


def _held_back(text: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of a tool call's tag."""
    return next((n for n in range(min(len(OPEN) - 1, len(text)), 0, -1) if OPEN.startswith(text[-n:])), 0)
