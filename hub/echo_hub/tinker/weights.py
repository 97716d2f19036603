"""Handlers that list, describe, delete and give out saved weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from aiohttp import hdrs, web

from echo_hub.tenants.outcomes import ModelInfo, TenantCheckpoint
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import WeightsKind
from echo_hub.tinker.age import SUFFIX, encrypted
from echo_hub.tinker.bodies import NewTtl, WeightsInfoBody, read_json
from echo_hub.tinker.signed_urls import LIFE_S
from echo_hub.tinker.statuses import AskedFor, json_answer, refused
from echo_hub.tinker.wire import PREFIX, Handle, TinkerWire, number_in_query, unsupported

FILE_PATH: Final = PREFIX + "/external_weights/{name:.+}"
MOST_LISTED: Final = 1_000
_TYPES: Final = {WeightsKind.TRAINING: "training", WeightsKind.SAMPLER: "sampler", WeightsKind.EXTERNAL: "external"}
_CHECKPOINTS: Final = "/training_runs/{run}/checkpoints"
_OF_ONE: Final = _CHECKPOINTS + "/{kind:weights|sampler_weights|external_weights}/{name}"

_Item = TypeVar("_Item")


class WeightsRoutes:
    """Handlers of the routes that list, describe, delete and download saved weights."""

    def __init__(self, wire: TinkerWire) -> None:
        self._service = wire.service
        self._signer = wire.signer
        self._access = wire.access
        self._address = wire.address

    def routes(self) -> Iterator[tuple[str, str, Handle]]:
        """Yield (method, path below the prefix, handler)."""
        yield "POST", "/weights_info", self._info
        yield "GET", "/training_runs", self._runs
        yield "GET", "/training_runs/{run}", self._run
        yield "GET", _CHECKPOINTS, self._checkpoints_of_run
        yield "GET", "/checkpoints", self._checkpoints
        yield "DELETE", _OF_ONE, self._delete
        yield "PUT", _OF_ONE + "/ttl", self._set_ttl
        yield "POST", _OF_ONE + "/publish", self._publish
        yield "DELETE", _OF_ONE + "/publish", self._publish
        yield "GET", _OF_ONE + "/external_weights_urls", self._urls

    async def _info(self, request: web.Request, tenant_id: str) -> web.Response:
        body = await read_json(request, WeightsInfoBody)
        model = (await self._service.weights(tenant_id, body.tinker_path)).model
        return json_answer(
            {
                "base_model": model.base_model,
                "is_lora": True,
                "lora_rank": model.rank,
                "train_unembed": False,
                "train_mlp": model.mlp,
                "train_attn": model.attention,
            }
        )

    async def _runs(self, request: web.Request, tenant_id: str) -> web.Response:
        models = sorted(await self._service.models(tenant_id), key=lambda model: -model.last_request_at)
        newest = _newest(await self._service.checkpoints(tenant_id))
        page, cursor = _page(request, models, default=20)
        return json_answer({"training_runs": [_run_json(one, tenant_id, newest) for one in page], "cursor": cursor})

    async def _run(self, request: web.Request, tenant_id: str) -> web.Response:
        model = await self._service.model(tenant_id, request.match_info["run"])
        newest = _newest(await self._service.checkpoints(tenant_id, model.model_id))
        return json_answer(_run_json(model, tenant_id, newest))

    async def _checkpoints_of_run(self, request: web.Request, tenant_id: str) -> web.Response:
        found = await self._service.checkpoints(tenant_id, request.match_info["run"])
        return json_answer({"checkpoints": [_checkpoint_json(one) for one in found], "cursor": None})

    async def _checkpoints(self, request: web.Request, tenant_id: str) -> web.Response:
        found = sorted(await self._service.checkpoints(tenant_id), key=lambda checkpoint: -checkpoint.made_at)
        page, cursor = _page(request, found, default=100)
        return json_answer({"checkpoints": [_checkpoint_json(one) for one in page], "cursor": cursor})

    async def _delete(self, request: web.Request, tenant_id: str) -> web.Response:
        await self._service.delete_weights(tenant_id, _path_of(request))
        return web.Response(status=204)

    async def _set_ttl(self, request: web.Request, tenant_id: str) -> web.Response:
        body = await read_json(request, NewTtl)
        await self._service.set_ttl(tenant_id, _path_of(request), body.ttl_seconds)
        return web.Response(status=204)

    async def _publish(self, _request: web.Request, _tenant_id: str) -> web.Response:
        raise unsupported("publish", "This hub does not publish weights.", "Download them as external weights.")

    async def _urls(self, request: web.Request, tenant_id: str) -> web.Response:
        path = _path_of(request)
        checkpoint = await self._service.weights(tenant_id, path)
        files = await self._service.weights_files(tenant_id, path)
        expires = int(time.time() + LIFE_S)
        base = f"{self._address(request) or str(request.url.origin())}{PREFIX}/external_weights/"
        names = [name + SUFFIX if checkpoint.recipients else name for name in files]
        urls = {name: base + self._signer.query(tenant_id, path, name, expires) for name in names}
        return json_answer({"urls": urls, "expires": _time(expires)})

    async def file(self, request: web.Request) -> web.StreamResponse:
        """Answer a signed URL, which needs no token, with its file. The URL becomes invalid when the tenant has no
        valid token any more."""
        name, query = request.match_info["name"], request.query
        tenant_id, path = query.get("tenant", ""), query.get("path", "")
        expires, signature = query.get("expires", ""), query.get("signature", "")
        is_signed = self._signer.holds(tenant_id, path, name, expires, signature)
        if not (is_signed and self._access.serves(tenant_id)):
            refusal = Refusal(
                RefusalKind.FORBIDDEN, "This URL is not valid, or has expired.", do="Ask for new external_weights_urls."
            )
            return refused(refusal, AskedFor.SUBMISSION)
        try:
            checkpoint = await self._service.weights(tenant_id, path)
            files = await self._service.weights_files(tenant_id, path)
        except Refusal as refusal:
            return refused(refusal, AskedFor.SUBMISSION)
        file = files.get(name.removesuffix(SUFFIX) if checkpoint.recipients else name)
        if file is None:
            raise web.HTTPNotFound
        if not checkpoint.recipients:
            return web.FileResponse(file, headers={hdrs.CONTENT_TYPE: "application/octet-stream"})
        return await _send_encrypted(request, file, checkpoint.recipients)


async def _send_encrypted(request: web.Request, file: Path, recipients: tuple[str, ...]) -> web.StreamResponse:
    response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: "application/octet-stream"})
    await response.prepare(request)
    with file.open("rb") as opened:
        pieces = encrypted(opened, recipients)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            await response.write(piece)
    await response.write_eof()
    return response


def _path_of(request: web.Request) -> str:
    found = request.match_info
    return f"tinker://{found['run']}/{found['kind']}/{found['name']}"


def _page(request: web.Request, items: list[_Item], *, default: int) -> tuple[list[_Item], dict[str, int]]:
    limit = number_in_query(request, "limit", default, most=MOST_LISTED)
    offset = number_in_query(request, "offset", 0, most=10**9)
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _newest(checkpoints: Iterable[TenantCheckpoint]) -> dict[tuple[str, WeightsKind], dict[str, Any]]:
    """Return the newest checkpoint of each model and kind."""
    found = {(one.model.model_id, one.kind): one for one in sorted(checkpoints, key=lambda one: one.made_at)}
    return {key: _checkpoint_json(one) for key, one in found.items()}


def _run_json(
    model: ModelInfo, tenant_id: str, newest: Mapping[tuple[str, WeightsKind], dict[str, Any]]
) -> dict[str, Any]:
    return {
        "training_run_id": model.model_id,
        "base_model": model.base_model,
        "model_owner": tenant_id,
        "is_lora": True,
        "lora_rank": model.rank,
        "corrupted": False,
        "last_request_time": _time(model.last_request_at),
        "last_checkpoint": newest.get((model.model_id, WeightsKind.TRAINING)),
        "last_sampler_checkpoint": newest.get((model.model_id, WeightsKind.SAMPLER)),
        "user_metadata": dict(model.user_metadata),
    }


def _checkpoint_json(checkpoint: TenantCheckpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": "/".join(checkpoint.path.rsplit("/", 2)[1:]),
        "checkpoint_type": _TYPES[checkpoint.kind],
        "time": _time(checkpoint.made_at),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": False,
        "user_metadata": dict(checkpoint.user_metadata),
        "expires_at": None if checkpoint.expires_at is None else _time(checkpoint.expires_at),
    }
