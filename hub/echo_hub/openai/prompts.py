"""Prompts of requests as token ids, and the tokens that the model's context has left for a completion.

The hub renders and encodes texts. Token ids from clients stay unchanged: encoding the decoded text can give different
ids.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.openai.error_answers import ContextTooLong
from echo_hub.openai.messages import template_messages
from echo_hub.openai.requests import ChatRequest
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.thinking import ends_in_thought
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_shared.errors import ConfigError

Ids = NDArray[np.int32]
AT_ONCE: Final = 2
"""Maximum number of threads that encode texts at the same time."""
RESERVED: Final = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "strftime_now", "tokenize", "return_dict"}
)
"""Variables of chat templates that a request may not replace."""
_LAST_TOKENS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadPrompt:
    ids: Ids
    """Token ids [P]."""
    room: int
    """Number of tokens that the context has left for a completion; at least 1."""


class PromptEncoder:
    """Turns prompts into token ids. `vocabulary_size` is the model's number of token ids."""

    def __init__(self, codec: PromptCodec, *, vocabulary_size: int) -> None:
        self._codec = codec
        self._vocabulary_size = vocabulary_size
        self._threads = asyncio.Semaphore(AT_ONCE)

    @property
    def context_tokens(self) -> int:
        return self._codec.context_tokens

    async def chat(self, request: ChatRequest) -> ReadPrompt:
        """Render a conversation with the model's chat template. Raises Refusal."""
        options = _template_options(request.chat_template_kwargs)
        messages = template_messages(request.messages)
        async with self._threads:
            return await asyncio.to_thread(self._chat, messages, request.tools, options)

    async def completion(self, prompt: Any, *, param: str = "prompt") -> ReadPrompt:
        """Return a prompt that is a text or a list of ids. Raises Refusal."""
        if not isinstance(prompt, str):
            return self._with_room(self._checked_ids(prompt, param), param)
        self._check_length(len(prompt), param)
        async with self._threads:
            return await asyncio.to_thread(self._raw, prompt, param)

    def _check_length(self, num_characters: int, param: str) -> None:
        """Raise ContextTooLong for a text that is certainly too long for the context. To encode it would take a minute
        and gigabytes."""
        least = num_characters // self._codec.longest_token
        if least >= self.context_tokens:
            raise ContextTooLong(num_tokens=least, context_tokens=self.context_tokens, param=param, is_least=True)

    def leaves_thought_open(self, prompt_ids: Ids) -> bool:
        """Return True if the prompt ends within a block of reasoning, which the reply then continues."""
        return ends_in_thought(self._codec.text(prompt_ids[-_LAST_TOKENS:]))

    def _chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> ReadPrompt:
        # The template may show anything of the request, for example the arguments of earlier calls.
        shown = json.dumps([messages, tools, options], ensure_ascii=False, separators=(",", ":"))
        self._check_length(len(shown), "messages")
        try:
            ids = self._codec.encode_chat(messages, tools=tools, options=options)
        except ConfigError as error:
            raise _not_encoded(error, "messages") from error
        return self._with_room(ids, "messages")

    def _raw(self, text: str, param: str) -> ReadPrompt:
        try:
            ids = self._codec.encode_raw(text)
        except ConfigError as error:
            raise _not_encoded(error, param) from error
        return self._with_room(ids, param)

    def _checked_ids(self, prompt: Any, param: str) -> Ids:
        """Return a client's list of ids as an array. Raises Refusal unless the model has every id."""
        if not isinstance(prompt, list) or not all(type(token_id) is int for token_id in prompt):
            raise Refusal(
                RefusalKind.INVALID,
                f"The option {param!r} is not valid.",
                got="a list whose items are neither all texts nor all token ids",
                do="Send a text, a list of token ids, or a list of these.",
                param=param,
            )
        least, most = min(prompt, default=0), max(prompt, default=0)
        if least < 0 or most >= self._vocabulary_size:
            raise Refusal(
                RefusalKind.INVALID,
                "The prompt has a token id that the model does not have.",
                got=str(least if least < 0 else most)[:40],
                do=f"Send ids from 0 to {self._vocabulary_size - 1}.",
                param=param,
            )
        return np.array(prompt, dtype=np.int32)

    def _with_room(self, ids: Ids, param: str) -> ReadPrompt:
        if not len(ids):
            raise Refusal(RefusalKind.INVALID, "The prompt is empty.", do="Send at least one token.", param=param)
        if len(ids) >= self.context_tokens:
            raise ContextTooLong(num_tokens=len(ids), context_tokens=self.context_tokens, param=param)
        return ReadPrompt(ids=ids, room=self.context_tokens - len(ids))


def _template_options(given: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in given:
        if name in RESERVED or not name.isidentifier():
            raise Refusal(
                RefusalKind.INVALID,
                "The option 'chat_template_kwargs' replaces a variable that the hub sets.",
                got=name[:100],
                do="Leave it out.",
                param="chat_template_kwargs",
            )
    return given


def _not_encoded(error: ConfigError, param: str) -> Refusal:
    return Refusal(RefusalKind.INVALID, error.what, got=error.got, do=error.do, param=param)
