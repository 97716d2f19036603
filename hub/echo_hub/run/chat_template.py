"""The base model's chat template: a conversation as text, with the run's own options and the task's tools."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from typing import Any, Final

from echo_shared.errors import ConfigError

Message = Mapping[str, Any]
"""What templates call a message: its `role` and `content`, and of a tool's its `name` and `tool_call_id`."""

DATE: Final = datetime(2024, 7, 26, tzinfo=UTC)
"""What templates show as today, so that a prompt is the same on any day: as `date_string`, and by `strftime_now`."""
_FAILURES: Final = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a template's own code raises besides Jinja's errors: for the length of what is not there, a text as a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """Every method raises ConfigError where the template cannot render what it is asked for."""

    source: str
    tool_source: str = ""
    """In its place where there are tools; empty: the same."""
    special_tokens: Mapping[str, str]
    """What the template may refer to, such as bos_token."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template's own."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Definitions of tools, as JSON schema, that every prompt begins with."""

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """Return the template that shows these tools."""
        return replace(self, source=self.tool_source or self.source, tools=tuple(tools))

    def check(self) -> None:
        """Raises ConfigError for options that the template does not have, and for tools that it does not show."""
        unknown = [name for name in self.options if not self._has(name)]
        if unknown:
            raise ConfigError(
                "The base model's chat template has no such option.",
                got=f"task.template_options: {', '.join(unknown)}",
                do="Remove it, or see chat_template.jinja, or tokenizer_config.json, for what the template asks for.",
            )
        if self.tools and not self._has("tools"):
            raise ConfigError(
                "The task gives tools, which the base model's chat template does not show.",
                do="Use a chat model whose template takes tools.",
            )

    def render(self, messages: Sequence[Message], *, is_for_reply: bool = True) -> str:
        """The conversation as text, ready for the reply unless it is not to be."""
        from jinja2 import TemplateError
        from transformers.utils import chat_template_utils

        # Its public function gives a template no function of the caller's, and strftime_now must be one.
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
                do="Use a model whose template takes these turns (a system turn is there for task.system_prompt, a "
                "tool's for an environment that answers as a tool), or take the template out of its directory.",
            ) from error

    def behind_reply(self, before: Sequence[Message], answers: Sequence[Message]) -> str:
        """What follows any reply to `before` up to the next reply, if it is answered so."""
        said = repr((before, answers, self.tools))
        # Stands for the reply; nothing else may look like it, whoever wrote it.
        reply = next(mark for number in count() if (mark := f"(echo:reply {number})") not in said)
        text = self.render([*before, {"role": "assistant", "content": reply}, *answers])
        _, found, behind = text.partition(reply)
        if not found:
            raise ConfigError(
                "The base model's chat template leaves out what the assistant said.",
                do="Use a model whose template takes several turns.",
            )
        return behind

    def begins_reply_with(self, messages: Sequence[Message]) -> str:
        """What the template writes of the reply itself, its heading included."""
        asked, plain = self.render(messages), self.render(messages, is_for_reply=False)
        alike = zip(asked, plain, strict=False)
        return asked[next((place for place, (a, b) in enumerate(alike) if a != b), len(plain)) :]

    def _has(self, name: str) -> bool:
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None
