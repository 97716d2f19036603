"""Handlers of clients' settings, sessions, models and samplers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from aiohttp import web

from echo_hub.tenants.outcomes import ModelInfo
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import LoraWish
from echo_hub.tinker.bodies import (
    CreateModel,
    CreateSampler,
    CreateSession,
    ModelBody,
    OptimizerConfig,
    SessionBody,
    read_json,
)
from echo_hub.tinker.statuses import json_answer
from echo_hub.tinker.training_body import CHUNK_BYTES
from echo_hub.tinker.wire import Handle, TinkerWire, future, texts, unsupported

WARNING: Final = (
    "This hub adapts attention and MLP layers: train_unembed has no effect. It refuses, each by its name:"
    " loss_fn=stable_reinforce, top_p, top_k, images and audio, optimizers other than AdamW,"
    " topk_sample_logprobs, target_prompt_logprobs, prompt_alt_tokens_k and prompt_logprobs_last_n."
    " Volunteers' computers draw the samples: a request takes seconds to minutes, and strangers see its prompt."
)
CLIENT_CONFIG: Final = {
    # Each sampler opens a single long poll; otherwise each sample request would open its own.
    "sample_use_retrieve_futures": True,
    "fwdbwd_max_chunk_bytes_count": CHUNK_BYTES,
    "pjwt_auth_enabled": False,
    "custom_loss_server_side": False,
    "proto_compress_fwdbwd": False,
    "sample_join_sampling_session": False,
}
DYNAMIC_CONFIG: Final = {"refresh_interval_sec": 300, "sample_cancel_enabled": True}


class SessionRoutes:
    """Handlers of the routes for clients' settings, sessions, models and samplers."""

    def __init__(self, wire: TinkerWire) -> None:
        self._service = wire.service

    def routes(self) -> Iterator[tuple[str, str, Handle]]:
        """Yield (method, path below the prefix, handler)."""
        yield "POST", "/client/config", self._client_config
        yield "POST", "/client/dynamic_config", self._dynamic_config
        yield "POST", "/telemetry", self._telemetry
        yield "GET", "/healthz", self._health
        yield "GET", "/get_server_capabilities", self._capabilities
        yield "POST", "/create_session", self._create_session
        yield "POST", "/session_heartbeat", self._heartbeat
        yield "POST", "/sessions/{session_id}/finish", self._finish
        yield "POST", "/create_model", self._create_model
        yield "POST", "/get_info", self._info
        yield "POST", "/create_sampling_session", self._create_sampler
        yield "GET", "/samplers/{sampler_id}", self._sampler

    async def _client_config(self, _request: web.Request, _tenant_id: str) -> web.Response:
        return json_answer(CLIENT_CONFIG)

    async def _dynamic_config(self, _request: web.Request, _tenant_id: str) -> web.Response:
        return json_answer(DYNAMIC_CONFIG)

    async def _telemetry(self, _request: web.Request, _tenant_id: str) -> web.Response:
        """Accept the client's telemetry without reading it."""
        return json_answer({"status": "accepted"})

    async def _health(self, _request: web.Request, _tenant_id: str) -> web.Response:
        return json_answer({"status": "ok"})

    async def _capabilities(self, _request: web.Request, _tenant_id: str) -> web.Response:
        models = [
            {
                "model_name": model.name,
                "max_context_length": model.max_context_length,
                "trainable": model.trainable,
                "sampleable": True,
            }
            for model in self._service.offered()
        ]
        return json_answer({"supported_models": models})

    async def _create_session(self, request: web.Request, tenant_id: str) -> web.Response:
        body = await read_json(request, CreateSession)
        session_id = await self._service.create_session(tenant_id, about=body.model_dump(mode="json", exclude={"type"}))
        return json_answer({"type": "create_session", "session_id": session_id, "warning_message": WARNING})

    async def _heartbeat(self, request: web.Request, tenant_id: str) -> web.Response:
        body = await read_json(request, SessionBody)
        try:
            await self._service.heartbeat(tenant_id, body.session_id)
        except Refusal as refusal:
            if refusal.kind is not RefusalKind.NOT_FOUND:
                raise
            # 410 ends the client's heartbeat. After any other status it would warn for ever.
            raise Refusal(RefusalKind.GONE, refusal.what, got=refusal.got, do=refusal.do) from refusal
        return json_answer({"type": "session_heartbeat"})

    async def _finish(self, request: web.Request, tenant_id: str) -> web.Response:
        await self._service.finish_session(tenant_id, request.match_info["session_id"])
        return json_answer({})

    async def _create_model(self, request: web.Request, tenant_id: str) -> web.Response:
        body = await read_json(request, CreateModel)
        refuse_optimizer(body.optimizer_config)
        lora = body.lora_config
        if lora is None:
            raise unsupported(
                "lora_config",
                "This hub trains adapters alone, and the request has no lora_config.",
                "Give a lora_config.",
            )
        if not (lora.train_attn or lora.train_mlp):
            raise unsupported(
                "lora_config",
                "lora_config leaves nothing to train: this hub has no adapter of the unembedding.",
                "Set train_mlp or train_attn.",
            )
        accepted = await self._service.create_model(
            tenant_id,
            body.session_id,
            model_seq_id=body.model_seq_id,
            base_model=body.base_model,
            lora=LoraWish(
                rank=lora.rank,
                seed=lora.seed,
                attention=lora.train_attn,
                mlp=lora.train_mlp,
                unembed=lora.train_unembed,
            ),
            user_metadata=texts(body.user_metadata),
        )
        return future(accepted)

    async def _info(self, request: web.Request, tenant_id: str) -> web.Response:
        body = await read_json(request, ModelBody)
        return json_answer(self._model_info(await self._service.model(tenant_id, body.model_id)))

    def _model_info(self, model: ModelInfo) -> dict[str, object]:
        tokenizers = {offered.name: offered.tokenizer for offered in self._service.offered()}
        return {
            "type": "get_info",
            "model_id": model.model_id,
            "model_name": model.base_model,
            "model_data": {
                "model_name": model.base_model,
                "tokenizer_id": tokenizers.get(model.base_model) or model.base_model,
            },
            "is_lora": True,
            "lora_rank": model.rank,
        }

    async def _create_sampler(self, request: web.Request, tenant_id: str) -> web.Response:
        body = await read_json(request, CreateSampler)
        if not (body.base_model or body.model_path):
            raise Refusal(
                RefusalKind.INVALID,
                "The sampling session has no weights.",
                do="Give base_model or model_path.",
                param="base_model",
            )
        sampler_id = await self._service.create_sampler(
            tenant_id,
            body.session_id,
            sampler_seq_id=body.sampling_session_seq_id,
            base_model=body.base_model or "",
            path=body.model_path or "",
        )
        return json_answer({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def _sampler(self, request: web.Request, tenant_id: str) -> web.Response:
        sampler_id = request.match_info["sampler_id"]
        base_model, path = await self._service.sampler(tenant_id, sampler_id)
        return json_answer({"sampler_id": sampler_id, "base_model": base_model, "model_path": path or None})


def refuse_optimizer(config: OptimizerConfig) -> None:
    """Raise Refusal if the optimizer is not AdamW."""
    if config.type != "adamw":
        raise unsupported(
            "optimizer_config",
            f"This hub does not offer the optimizer {config.type[:40]}.",
            "Use AdamW, the SDK's default.",
        )
