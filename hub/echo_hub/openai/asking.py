"""Read the body of each endpoint: options, prompts in token ids, and the form of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, assert_never

from echo_hub.openai.answer_forms import AskedCompletions, ChatForm, CompletionForm, GenerateForm
from echo_hub.openai.prompts import PromptEncoder
from echo_hub.openai.requests import ChatRequest, CompletionRequest, GenerateRequest
from echo_hub.openai.token_texts import TokenTexts
from echo_hub.tenants.refusal import Refusal, RefusalKind

MOST_ANSWER_TOKENS: Final = 2**21
"""Largest number of tokens in one answer. A token takes about 100 bytes of JSON."""


class Endpoint(StrEnum):
    """Paths of the endpoints that complete prompts."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    GENERATE = "/inference/v1/generate"


class RequestReader:
    def __init__(self, encoder: PromptEncoder, texts: TokenTexts) -> None:
        self._encoder = encoder
        self._texts = texts

    async def read(self, endpoint: Endpoint, body: Mapping[str, Any]) -> AskedCompletions:
        """Check a request's body, and return it in the form that is drawn. Raises Refusal with the name of the wrong
        option."""
        match endpoint:
            case Endpoint.CHAT:
                asked = await self._chat(body)
            case Endpoint.COMPLETIONS:
                asked = await self._completion(body)
            case Endpoint.GENERATE:
                asked = await self._generate(body)
            case _:
                assert_never(endpoint)
        options, most = asked.options, 0
        for prompt in asked.prompts:
            most += options.n * (options.wish(room=prompt.room).max_tokens or 0)
            if options.return_token_ids and endpoint is Endpoint.COMPLETIONS:
                most += options.n * len(prompt.ids)  # Each completion repeats its prompt.
        if most > MOST_ANSWER_TOKENS:
            raise Refusal(
                RefusalKind.INVALID,
                "The answer could become too large.",
                got=f"up to {most} tokens in all completions",
                do=f"Ask for at most {MOST_ANSWER_TOKENS} in one request: fewer prompts, n or max_tokens, or no "
                "return_token_ids, which repeats each prompt n times.",
                param="max_tokens",
            )
        return asked

    async def _chat(self, body: Mapping[str, Any]) -> AskedCompletions:
        request = ChatRequest.read(body)
        prompt = await self._encoder.chat(request)
        form = ChatForm(request, prompt, self._texts)
        return AskedCompletions(options=request, prompts=[prompt], form=form, stream=form if request.stream else None)

    async def _completion(self, body: Mapping[str, Any]) -> AskedCompletions:
        request = CompletionRequest.read(body)
        prompts = await asyncio.gather(*map(self._encoder.completion, request.prompts))
        form = CompletionForm(request, prompts, self._texts)
        return AskedCompletions(options=request, prompts=prompts, form=form, stream=form if request.stream else None)

    async def _generate(self, body: Mapping[str, Any]) -> AskedCompletions:
        request = GenerateRequest.read(body)
        prompt = await self._encoder.completion(request.token_ids, param="token_ids")
        return AskedCompletions(options=request, prompts=[prompt], form=GenerateForm(request, prompt, self._texts))
