"""Bodies of the three requests for completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field

from echo_hub.openai.error_answers import UnsupportedOption
from echo_hub.openai.messages import MOST_ITEMS, MOST_MESSAGES, MOST_TOOLS, ChatMessage, Tool
from echo_hub.openai.options import OpenAiFields, SamplingOptions
from echo_hub.tenants.refusal import Refusal, RefusalKind

MOST_PROMPTS: Final = 1_024
"""Largest number of prompts in one request to `/v1/completions`."""
MOST_COMPLETIONS: Final = 4_096
"""Largest number of completions of all prompts of one request."""
USUAL_TOKENS: Final = 16
"""Value of `max_tokens` for `/v1/completions` if the request names none, as in OpenAI's API."""
_NO_TOP: Final = "Nodes report only the drawn token's log-probability: ask for 0."


class ResponseFormat(OpenAiFields):
    type: str


class ChatRequest(SamplingOptions):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """Largest number of tokens. It takes precedence over `max_tokens`, the older name of the same option."""
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    response_format: ResponseFormat = ResponseFormat(type="text")
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=32)] = Field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0)] = 0

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        _check_items(body.get("messages"))
        request = super().read(body)
        if request.tool_choice not in ("auto", "none"):
            raise UnsupportedOption(
                "tool_choice", got=repr(request.tool_choice)[:100], do='Use "auto" or "none", and ask for the call.'
            )
        if request.response_format.type != "text":
            raise UnsupportedOption(
                "response_format",
                got=request.response_format.type[:100],
                do="Ask for the format in the prompt, and check the answer.",
            )
        if request.top_logprobs:
            raise UnsupportedOption("top_logprobs", got=str(request.top_logprobs), do=_NO_TOP)
        return request

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def reads_calls(self) -> bool:
        """True if tool calls in the replies are to be parsed."""
        return bool(self.tools) and self.tool_choice == "auto"


def _check_items(messages: object) -> None:
    """Raise Refusal if the messages have too many parts and tool calls. Other faults are found later."""
    if not isinstance(messages, list) or len(messages) > MOST_MESSAGES:
        return
    lists = (value for one in messages if isinstance(one, dict) for value in one.values() if isinstance(value, list))
    if (count := sum(map(len, lists))) > MOST_ITEMS:
        raise Refusal(
            RefusalKind.INVALID,
            "The messages have too many parts and tool calls.",
            got=f"{count:,}",
            do=f"Send at most {MOST_ITEMS:,} in all messages: join parts of text.",
            param="messages",
        )


class CompletionRequest(SamplingOptions):
    """Body of `/v1/completions`. Prompts in token ids are used as they are."""

    prompt: str | list[Any]
    """One prompt, or a list of prompts, each a text or a list of token ids; `prompts` reads it."""
    logprobs: Annotated[int, Field(ge=0)] | None = None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        request = super().read(body)
        if request.logprobs is not None and request.logprobs > 1:
            raise UnsupportedOption("logprobs", got=str(request.logprobs), do=_NO_TOP)
        return request

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each a text or a list that should hold token ids. Raises Refusal if they are too many."""
        given = self.prompt
        found = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
        if len(found) > MOST_PROMPTS or len(found) * self.n > MOST_COMPLETIONS:
            raise Refusal(
                RefusalKind.INVALID,
                "The request asks for too many completions.",
                got=f"{len(found)} prompts with n = {self.n}",
                do=f"Send at most {MOST_PROMPTS} prompts, and ask for at most {MOST_COMPLETIONS} completions of all.",
                param="prompt",
            )
        return found

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens or USUAL_TOKENS


class GenerateRequest(SamplingOptions):
    """Body of `/inference/v1/generate`. The fields of its object `sampling_params` are fields of this class, next to
    the other options."""

    token_ids: list[Any]
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    stream: Literal[False] = False

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        params = body.get("sampling_params") or {}
        if not isinstance(params, dict):
            raise Refusal(
                RefusalKind.INVALID,
                "The option 'sampling_params' is not an object.",
                got=type(params).__name__,
                param="sampling_params",
            )
        request = super().read({**body, **params})
        if request.logprobs is not None and request.logprobs > 1:
            raise UnsupportedOption("logprobs", got=str(request.logprobs), do=_NO_TOP)
        return request
