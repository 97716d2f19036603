"""The OpenAI-compatible API: sampling from this run's models with clients of OpenAI's servers or vLLM.

GET  /v1/models               the models that a token may use: see `model_list`
GET  /v1/models/NAME          one of them
POST /v1/chat/completions     a conversation, rendered with the model's chat template
POST /v1/completions          prompts as texts or token ids
POST /inference/v1/generate   one prompt as token ids; the answer is token ids too
GET  /health                  {} and 200 while the hub serves; public

Authorization: Bearer TOKEN, with a token of the scope use. An error is {"error": {"message", "type", "param", "code"}}.
The hub refuses unsupported options that would change samples, by name; see `unsupported`.
"""

from __future__ import annotations

import logging

from aiohttp import hdrs, web

from echo_hub.openai.answering import CompletionAnswers, end_with_error
from echo_hub.openai.asking import Endpoint, RequestReader
from echo_hub.openai.error_answers import error_answer, failed_answer
from echo_hub.openai.event_stream import ChunkStream
from echo_hub.openai.model_list import ModelList
from echo_hub.openai.prompts import PromptEncoder
from echo_hub.openai.request_body import BodyReader
from echo_hub.openai.token_texts import TokenTexts
from echo_hub.run.base_model import PromptCodec
from echo_hub.tenants.access import TenantAccess
from echo_hub.tenants.refusal import Refusal
from echo_hub.tenants.service import TenantService
from echo_shared.errors import StorageError

log = logging.getLogger(__name__)


class OpenAiApi:
    """Route handlers. `vocabulary_size` is the model's number of token ids. `fingerprint` identifies the base model's
    files."""

    def __init__(
        self,
        service: TenantService,
        access: TenantAccess,
        codec: PromptCodec,
        *,
        vocabulary_size: int,
        fingerprint: str,
    ) -> None:
        encoder = PromptEncoder(codec, vocabulary_size=vocabulary_size)
        self._access = access
        self._bodies = BodyReader()
        self._reader = RequestReader(encoder, TokenTexts(codec))
        self._answers = CompletionAnswers(service, codec, encoder, fingerprint=fingerprint)
        self._models = ModelList(service, context_tokens=codec.context_tokens)

    @property
    def routes(self) -> list[web.AbstractRouteDef]:
        return [
            web.get("/health", self.health),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model:.+}", self.models),
            *(web.post(endpoint.value, self.complete) for endpoint in Endpoint),
        ]

    @property
    def num_held_bytes(self) -> int:
        """Number of bytes of request bodies that are being read or parsed."""
        return self._bodies.num_held_bytes

    async def health(self, _request: web.Request) -> web.Response:
        """GET /health"""
        return web.json_response({}, headers={hdrs.CACHE_CONTROL: "no-store"})

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models and /v1/models/{model}"""
        try:
            async with self._access.admitted(request) as tenant_id:
                name = request.match_info.get("model")
                found = await (self._models.every(tenant_id) if name is None else self._models.one(tenant_id, name))
                return web.json_response(found, headers={hdrs.CACHE_CONTROL: "no-store"})
        except Refusal as refusal:
            return error_answer(refusal)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """POST to one of `Endpoint`"""
        stream = ChunkStream(request)
        try:
            async with self._access.admitted(request) as tenant_id:
                async with self._bodies.read(request, tenant_id) as body:
                    asked = await self._reader.read(Endpoint(request.path), body)
                return await self._answers.answer(request, tenant_id, asked, stream)
        except Refusal as refusal:
            if not stream.is_open:
                return error_answer(refusal)
            await end_with_error(stream, refusal)
        except Exception as error:
            if isinstance(error, StorageError) and not stream.is_open:
                raise  # A middleware answers it while the database server cannot be reached.
            log.exception("a request to %s failed", request.path)
            if not stream.is_open:
                return failed_answer()
            await end_with_error(stream, error)
        return stream.response
