"""Render a conversation with the base model's chat template, the run's template options and the task's tools."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from typing import Any, Final

from echo_shared.errors import ConfigError

Message = Mapping[str, Any]
"""A chat message: `role` and `content`; tool messages also have `name` and `tool_call_id`."""

DATE: Final = datetime(2024, 7, 26, tzinfo=UTC)
"""Date that chat templates get as today's (`date_string`, `strftime_now`). It is fixed, so that prompts do not change
every day.
"""
_FAILURES: Final = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors that template code raises besides Jinja's own, for example by arithmetic on a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A chat template. Every method raises ConfigError if the template cannot be rendered."""

    source: str
    tool_source: str = ""
    """Template to use instead of `source` if there are tools; "" means that `source` serves with and without tools."""
    special_tokens: Mapping[str, str]
    """Texts of special tokens that the template may use, such as bos_token."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Additional template variables, from task.template_options."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tool definitions as JSON schema; every prompt begins with them."""

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        return replace(self, source=self.tool_source or self.source, tools=tuple(tools))

    def check(self) -> None:
        """Raise ConfigError for unused template options, and for tools that the template does not show."""
        unknown = [name for name in self.options if not self._has(name)]
        if unknown:
            raise ConfigError(
                "The base model's chat template has no such option.",
                got=f"task.template_options: {', '.join(unknown)}",
                do="Remove it, or look up the template's variables in chat_template.jinja or tokenizer_config.json.",
            )
        if self.tools and not self._has("tools"):
            raise ConfigError(
                "The task has tools, but the base model's chat template does not show tools.",
                do="Use a chat model whose template supports tools.",
            )

    def render(self, messages: Sequence[Message], *, is_for_reply: bool = True) -> str:
        """Return the conversation as text. It ends with the header of the reply, unless `is_for_reply` is False."""
        from jinja2 import TemplateError
        from transformers.utils import chat_template_utils

        # The public function takes no extra functions, but strftime_now must be one.
        compiled: Any = chat_template_utils._compile_jinja_template
        variables = {
            "messages": [dict(message) for message in messages],
            "tools": [dict(tool) for tool in self.tools] or None,
            "documents": None,
            "add_generation_prompt": is_for_reply,
            "date_string": f"{DATE:%d %b %Y}",
            "strftime_now": DATE.strftime,
        }
        try:
            return str(compiled(self.source).render({**variables, **self.special_tokens, **self.options}))
        except (TemplateError, *_FAILURES) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ConfigError(
                "The base model's chat template cannot be rendered.",
                got=f"turns of {roles}: {error}",
                do="Use a model whose template supports these turns (task.system_prompt needs a system turn, an "
                "environment that answers as a tool needs a tool turn), or remove the template from its directory.",
            ) from error

    def behind_reply(self, before: Sequence[Message], answers: Sequence[Message]) -> str:
        """Return the text that the template writes from the end of a reply to `before` up to the next reply, if
        `answers` come after the reply.
        """
        said = repr((before, answers, self.tools))
        # As the reply, use a placeholder that occurs nowhere else in the conversation.
        reply = next(mark for number in count() if (mark := f"(echo:reply {number})") not in said)
        text = self.render([*before, {"role": "assistant", "content": reply}, *answers])
        _, found, behind = text.partition(reply)
        if not found:
            raise ConfigError(
                "The base model's chat template omits the assistant's message.",
                do="Use a model whose template supports several turns.",
            )
        return behind

    def begins_reply_with(self, messages: Sequence[Message]) -> str:
        """Return the text with which the template itself begins a reply, including the reply's header."""
        asked, plain = self.render(messages), self.render(messages, is_for_reply=False)
        alike = zip(asked, plain, strict=False)
        return asked[next((place for place, (a, b) in enumerate(alike) if a != b), len(plain)) :]

    def _has(self, name: str) -> bool:
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None
