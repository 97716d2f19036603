"""Handlers of training requests: forward_backward, optim_step, and saving and loading weights.

Every request has a number (seq_id) in the order of its model. The client counts a refused request as done, unless it
repeats the request after this kind of refusal (`REPEATED`). So every other refusal is reported to the service: later
requests must not wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from aiohttp import web

from echo_hub.tenants.outcomes import Accepted
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import AdamStep, WeightsKind
from echo_hub.tinker.age import public_key
from echo_hub.tinker.bodies import MOST_JSON_BYTES as MOST_BYTES
from echo_hub.tinker.bodies import (
    LoadWeights,
    OptimStep,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    TrainingIdentity,
    parse_json,
    read_body,
)
from echo_hub.tinker.sessions import refuse_optimizer
from echo_hub.tinker.training_body import MOST_BODY_BYTES, read_head, read_request
from echo_hub.tinker.wire import Handle, TinkerWire, future, texts, unsupported

REPEATED = frozenset({RefusalKind.TOO_MANY, RefusalKind.QUOTA_SPENT, RefusalKind.NOT_READY})
"""Refusals after which clients send the same request again, with the same seq_id."""
PROTOBUF = "application/x-protobuf"
_ON_LOOP_BYTES = 32 * 1024
"""Maximum size of a body that is decoded on the event loop; a larger one is decoded on a thread."""


_AT_ONCE = 2
"""Maximum number of threads that decode bodies. More threads would slow the event loop down."""


class TrainingRoutes:
    """Handlers of the routes for forward_backward, optim_step, and saving and loading weights."""

    def __init__(self, wire: TinkerWire) -> None:
        self._service = wire.service
        self._room = wire.room
        self._threads = asyncio.Semaphore(_AT_ONCE)

    def routes(self) -> Iterator[tuple[str, str, Handle]]:
        """Yield (method, path below the prefix, handler)."""
        yield "POST", "/forward_backward", self._forward_backward
        yield "POST", "/optim_step", self._optim_step
        yield "POST", "/save_weights", self._save
        yield "POST", "/save_weights_for_sampler", self._save_for_sampler
        yield "POST", "/save_weights_external", self._save_external
        yield "POST", "/load_weights", self._load

    @asynccontextmanager
    async def _reading(
        self, tenant_id: str, model_id: str, seq_id: int, *, spoils: bool = False
    ) -> AsyncIterator[None]:
        """Report a final refusal that is raised within this context to the service."""
        try:
            yield
        except Refusal as refusal:
            if refusal.kind not in REPEATED:
                await self._service.refused(tenant_id, model_id, seq_id=seq_id, spoils=spoils)
            raise

    async def _forward_backward(self, request: web.Request, tenant_id: str) -> web.Response:
        if request.content_type != PROTOBUF:
            raise unsupported(
                "Content-Type",
                f"forward_backward takes {PROTOBUF} alone, and the request has {request.content_type[:80]}.",
                "Use the tinker SDK 0.38 or newer.",
            )
        async with self._room.reading(tenant_id, request, MOST_BODY_BYTES) as body:
            head = read_head(body)
            async with self._reading(tenant_id, head.model_id, head.seq_id, spoils=not head.forward_only):
                if len(body) > _ON_LOOP_BYTES:
                    async with self._threads:
                        asked = await asyncio.to_thread(read_request, body)
                else:
                    asked = read_request(body)
                accepted = await self._service.forward_backward(
                    tenant_id, head.model_id, seq_id=head.seq_id, request=asked
                )
        return future(accepted, model_id=head.model_id)

    async def _identity(self, request: web.Request) -> tuple[bytes, TrainingIdentity]:
        body = await read_body(request, MOST_BYTES)
        return body, parse_json(body, TrainingIdentity)

    async def _optim_step(self, request: web.Request, tenant_id: str) -> web.Response:
        body, identity = await self._identity(request)
        async with self._reading(tenant_id, identity.model_id, identity.seq_id, spoils=True):
            asked = parse_json(body, OptimStep)
            if asked.optimizer_params is not None or asked.adam_params is None:
                kind = str((asked.optimizer_params or {}).get("type", ""))[:40]
                raise unsupported(
                    "optimizer_params",
                    f"This hub does not offer the optimizer {kind}." if kind else "The step has no adam_params.",
                    "Send adam_params: this hub trains with AdamW.",
                )
            step = AdamStep(**asked.adam_params.model_dump(exclude={"type"}))
            accepted = await self._service.optim_step(tenant_id, identity.model_id, seq_id=identity.seq_id, step=step)
        return self._future(identity, accepted)

    async def _save(self, request: web.Request, tenant_id: str) -> web.Response:
        body, identity = await self._identity(request)
        async with self._reading(tenant_id, identity.model_id, identity.seq_id):
            asked = parse_json(body, SaveWeights)
            accepted = await self._service.save_weights(
                tenant_id,
                asked.model_id,
                seq_id=asked.seq_id,
                kind=WeightsKind.TRAINING,
                name=asked.path,
                ttl_s=asked.ttl_seconds,
                overwrite=asked.overwrite,
                user_metadata=texts(asked.user_metadata),
            )
        return self._future(identity, accepted)

    async def _save_for_sampler(self, request: web.Request, tenant_id: str) -> web.Response:
        body, identity = await self._identity(request)
        async with self._reading(tenant_id, identity.model_id, identity.seq_id):
            asked = parse_json(body, SaveWeightsForSampler)
            if asked.path is None and asked.sampling_session_seq_id is None:
                raise Refusal(
                    RefusalKind.INVALID,
                    "The request names neither the weights nor a sampling session.",
                    do="Give path or sampling_session_seq_id.",
                    param="path",
                )
            accepted = await self._service.save_weights(
                tenant_id,
                asked.model_id,
                seq_id=asked.seq_id,
                kind=WeightsKind.SAMPLER,
                name=asked.path,
                sampler_seq_id=asked.sampling_session_seq_id,
                ttl_s=asked.ttl_seconds,
                inflight=asked.kind == "inflight",
                user_metadata=texts(asked.user_metadata),
            )
        return self._future(identity, accepted)

    async def _save_external(self, request: web.Request, tenant_id: str) -> web.Response:
        body, identity = await self._identity(request)
        async with self._reading(tenant_id, identity.model_id, identity.seq_id):
            asked = parse_json(body, SaveWeightsExternal)
            recipients = asked.age_encryption_recipients or ()
            for recipient in recipients:
                public_key(recipient)
            accepted = await self._service.save_weights(
                tenant_id,
                asked.model_id,
                seq_id=asked.seq_id,
                kind=WeightsKind.EXTERNAL,
                name=asked.path,
                ttl_s=asked.ttl_seconds,
                recipients=recipients,
            )
        return self._future(identity, accepted)

    async def _load(self, request: web.Request, tenant_id: str) -> web.Response:
        asked = parse_json(await read_body(request, MOST_BYTES), LoadWeights)
        async with self._reading(tenant_id, asked.model_id or "", asked.seq_id or 0):
            refuse_optimizer(asked.optimizer_config)
            if asked.weights_access_token is not None:
                raise unsupported(
                    "weights_access_token",
                    "This hub does not offer weights_access_token.",
                    "Load weights of your own tenant.",
                )
            makes_model = asked.session_id is not None and asked.model_seq_id is not None
            if makes_model == (asked.model_id is not None and asked.seq_id is not None):
                raise Refusal(
                    RefusalKind.INVALID,
                    "The request must name either a new model or an existing one.",
                    do="Give session_id and model_seq_id, or model_id and seq_id.",
                    param="session_id",
                )
            if asked.base_model is not None and asked.base_model not in {
                model.name for model in self._service.offered()
            }:
                raise unsupported(
                    "base_model",
                    f"This hub does not serve the base model {asked.base_model[:80]}.",
                    "Leave base_model out: the weights name their base.",
                )
            accepted = await self._service.load_weights(
                tenant_id,
                path=asked.path,
                optimizer=asked.optimizer,
                session_id=asked.session_id or "",
                model_seq_id=asked.model_seq_id,
                model_id=asked.model_id or "",
                seq_id=asked.seq_id,
                user_metadata=texts(asked.user_metadata) if asked.user_metadata is not None else None,
            )
        return future(accepted)

    def _future(self, identity: TrainingIdentity, accepted: Accepted) -> web.Response:
        return future(accepted, model_id=identity.model_id)
