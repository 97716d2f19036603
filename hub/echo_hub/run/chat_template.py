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
"""The date that chat templates get as today's date (`date_string`, `strftime_now`). It is fixed, so that prompts do not
change every day."""
_ANSWER: Final = "408"
_FAILURES: Final = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors, in addition to Jinja's own, that the code in a template may raise, for example by arithmetic on a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A chat template. Every method raises ConfigError if the template cannot be rendered."""

    source: str
    tool_source: str = ""
    """Template to use instead of `source` if there are tools; "" means that `source` is used with and without tools."""
    special_tokens: Mapping[str, str]
    """Texts of special tokens that the template may use, such as bos_token."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Additional template variables, from task.template_options."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tool definitions as JSON schema; every prompt begins with them."""
    shows_calls: bool = False
    """True if the template gets a reply before a tool's answer as a tool call, not as text. This is needed if the
    template writes the answer differently after a call."""

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        return replace(self, source=self.tool_source or self.source, tools=tuple(tools))

    def showing_answers(self, before: Sequence[Message], *, stops: Sequence[str]) -> ChatTemplate:
        """Return this template with the form of replies (text or tool call) in which it shows a tool's answer.

        Most templates write the answer in the same way after any reply. For these, a reply stays text, because some
        templates render only one call a turn. Other templates refuse an answer without a call, omit it, or end the turn
        differently. Raises ConfigError if the template shows no answer in either form.
        """
        name = next((str(tool["function"]["name"]) for tool in self.tools if "function" in tool), "tool")
        answer = {"role": "tool", "content": _ANSWER, "name": name, "tool_call_id": "000000000"}
        shown: dict[bool, str] = {}
        problem = ConfigError(
            "The base model's chat template omits a tool's answer.", do="Use a model whose template supports tools."
        )
        for shows_calls in (True, False):
            try:
                text = replace(self, shows_calls=shows_calls).behind_reply(before, [answer], stops=stops)
            except ConfigError as error:
                problem = problem if shows_calls else error
            else:
                if _ANSWER in text:
                    shown[shows_calls] = text
        if not shown:
            raise problem
        return replace(self, shows_calls=True in shown and shown[True] != shown.get(False))

    def check(self) -> None:
        """Raise ConfigError if the template ignores one of its options, or does not show the tools."""
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

    def behind_reply(self, before: Sequence[Message], answers: Sequence[Message], *, stops: Sequence[str] = ()) -> str:
        """Return the text that the template writes from the end of a reply to `before` up to the next reply. `answers`
        are the messages after the first reply.

        If `shows_calls`, the text of a tool's answer begins with the first of `stops`, the tokens that end a reply.
        """
        said = repr((before, answers, self.tools))
        # As the reply, use a placeholder that occurs nowhere else in the conversation.
        reply = next(mark for number in count() if (mark := f"(echo:reply {number})") not in said)
        calls = [_call_before(message, reply) for message in answers if message["role"] == "tool"]
        if self.shows_calls and calls:
            text = self.render([*before, {"role": "assistant", "content": "", "tool_calls": calls}, *answers])
            _, found, behind = text.rpartition(reply)
            places = [place for stop in stops if found and (place := behind.find(stop)) >= 0]
            if not places:
                raise ConfigError(
                    "The base model's chat template does not end a tool call with one of the model's stop tokens.",
                    got=f"stop tokens {', '.join(stops)}; {behind[:200]!r}",
                    do="Add the token that ends a tool call to eos_token_id in the model's generation_config.json.",
                )
            return behind[min(places) :]
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


def _call_before(answer: Message, argument: str) -> dict[str, Any]:
    """Return the tool call to which the tool's message `answer` belongs."""
    function = {"name": answer.get("name", ""), "arguments": {"value": argument}}
    return {"id": answer.get("tool_call_id", ""), "type": "function", "function": function}
