"""The service behind both APIs (the wires): sessions, models, samplers, ordered requests and futures of all tenants.

Identity: (model id, seq_id) of training requests, (sampler id, seq_id) of sample requests. A repeated request with the
same identity gets the same request id, without a second computation. Each request is in the store before its id is
returned. Requests of one model run in the order of seq_id; models are independent of each other. All methods raise
Refusal.

    model_requests, sample_requests   check a request and commit it
      model_work, sampling            carry it out and commit its outcome: two tasks, which `run` owns
        recovery, version_saves       a model's checkpoints and its journal; publication of its versions
      futures                         who waits for an outcome
    housekeeping, reopening           what ends by time; what a restarted hub takes up again
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from echo_hub.store.tenant_reading import find_model, find_request_by_id, read_models, read_tokens_of_day
from echo_hub.store.tenant_records import SessionRow
from echo_hub.tenants.computing import ComputerHost
from echo_hub.tenants.core import Offer, TenantCore
from echo_hub.tenants.drawing import DrawnPiece
from echo_hub.tenants.gradient_state import JournalKind
from echo_hub.tenants.housekeeping import TenantHousekeeping
from echo_hub.tenants.model_requests import MOST_NUMBER, ModelRequests, check_about, check_number
from echo_hub.tenants.model_work import ModelWork
from echo_hub.tenants.outcomes import (
    Accepted,
    ModelInfo,
    OfferedModel,
    Outcome,
    Pending,
    TenantCheckpoint,
)
from echo_hub.tenants.paths import WeightsPath
from echo_hub.tenants.quotas import Quotas, day_of
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.reopening import Reopening
from echo_hub.tenants.requests import (
    AdamStep,
    ForwardBackward,
    LoraWish,
    Sample,
    SampleResult,
    SamplingWish,
    WeightsKind,
)
from echo_hub.tenants.sample_requests import SampleRequests
from echo_hub.tenants.sampling import TenantSampling
from echo_hub.tenants.sessions import LiveSession, new_session_id, sampler_id_of
from echo_hub.tenants.stored import LoadWork, SaveWork
from echo_hub.tenants.version_saves import VersionSaves
from echo_hub.tenants.weights import Weights, info_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantParts:
    """The parts of the service. `echo_hub.tenants.building` makes them."""

    core: TenantCore
    offer: Offer
    weights: Weights
    saves: VersionSaves
    work: ModelWork
    sampling: TenantSampling
    models: ModelRequests
    samples: SampleRequests
    housekeeping: TenantHousekeeping
    reopening: Reopening


class TenantService:
    """The service for all tenants of one hub. `tenant_id` is the id of the API token that the API has checked. Call
    `open` first, then keep `run` running, and `close` after it."""

    def __init__(self, parts: TenantParts) -> None:
        self._parts = parts

    async def open(self) -> None:
        """Load sessions, models, samplers and unfinished requests from the database. Call it once, before `run`."""
        parts, now = self._parts, time.time()
        await parts.core.writer.open()
        parts.core.quotas.restore(await parts.core.store.read(read_tokens_of_day, day_of(now)), now=now)
        await parts.reopening.reopen()

    async def run(self) -> None:
        """Carry out requests until cancelled. Raises StorageError if the database fails."""
        parts = self._parts
        async with asyncio.TaskGroup() as tasks:
            for work in (parts.work.run(), parts.sampling.run(), parts.housekeeping.run()):
                tasks.create_task(work)

    async def close(self) -> None:
        """Stop the process that holds the models, after the last commit. The next start resumes unfinished requests."""
        parts = self._parts
        await parts.saves.close()
        await parts.core.identities.close()
        await parts.core.adapters.close()
        await parts.core.futures.close()
        await parts.core.writer.close()
        await parts.core.host.stop()

    @property
    def host(self) -> ComputerHost:
        """Owner of the process that holds the models."""
        return self._parts.core.host

    @property
    def housekeeping(self) -> TenantHousekeeping:
        return self._parts.housekeeping

    @property
    def quotas(self) -> Quotas:
        return self._parts.core.quotas

    def offered(self) -> tuple[OfferedModel, ...]:
        return self._parts.offer.models

    async def create_session(self, tenant_id: str, *, about: Mapping[str, object]) -> str:
        """Create a session, and return its id. `about` is the client's description (tags, SDK version, metadata),
        stored unchanged."""
        parts = self._parts
        check_about("about the session", about)
        num_open = parts.core.sessions.num_sessions(tenant_id)
        parts.core.quotas.check_session(tenant_id, num_open, elapsed=time.monotonic())
        return await parts.core.identities.finished(self._create_session(tenant_id, about))

    async def _create_session(self, tenant_id: str, about: Mapping[str, object]) -> str:
        session = LiveSession(session_id=new_session_id(), tenant_id=tenant_id, last_seen=time.monotonic())
        self._parts.core.sessions.add(session)
        row = SessionRow(session_id=session.session_id, tenant_id=tenant_id, about=dict(about), made_at=time.time())
        await self._parts.core.writer.commit(row)
        return session.session_id

    async def heartbeat(self, tenant_id: str, session_id: str) -> None:
        await self._parts.models.session(tenant_id, session_id)

    async def finish_session(self, tenant_id: str, session_id: str) -> None:
        session = await self._parts.models.session(tenant_id, session_id)
        await self._parts.core.identities.finished(self._parts.housekeeping.end(session))

    async def create_model(
        self,
        tenant_id: str,
        session_id: str,
        *,
        model_seq_id: int,
        base_model: str,
        lora: LoraWish,
        user_metadata: Mapping[str, str],
    ) -> Accepted:
        return await self._parts.models.create(
            tenant_id,
            session_id,
            model_seq_id=model_seq_id,
            base_model=base_model,
            lora=lora,
            user_metadata=user_metadata,
        )

    async def forward_backward(
        self, tenant_id: str, model_id: str, *, seq_id: int, request: ForwardBackward
    ) -> Accepted:
        kind = JournalKind.FORWARD if request.forward_only else JournalKind.PASS
        return await self._parts.models.submit(tenant_id, model_id, seq_id, kind, request)

    async def optim_step(self, tenant_id: str, model_id: str, *, seq_id: int, step: AdamStep) -> Accepted:
        return await self._parts.models.submit(tenant_id, model_id, seq_id, JournalKind.STEP, step)

    async def save_weights(
        self,
        tenant_id: str,
        model_id: str,
        *,
        seq_id: int,
        kind: WeightsKind,
        name: str | None,
        sampler_seq_id: int | None = None,
        ttl_s: float | None = None,
        overwrite: bool = False,
        inflight: bool = False,
        recipients: tuple[str, ...] = (),
        user_metadata: Mapping[str, str] | None = None,
    ) -> Accepted:
        """Save a model's weights under `name`. `name` None: save an unnamed version for a new sampler, whose number is
        `sampler_seq_id`. `inflight`: the sampler draws each new request with the model's newest inflight version.
        `recipients`: see `TenantCheckpoint`."""
        if (name is None) == (sampler_seq_id is None):
            raise Refusal(
                RefusalKind.INVALID,
                "Weights are saved either under a name or for a new sampler.",
                got=f"name {name!r}, sampler {sampler_seq_id!r}",
                do="Give exactly one of path and sampling_session_seq_id.",
                param="path",
            )
        model = await self._parts.models.model(tenant_id, model_id)
        if sampler_seq_id is not None:
            check_number("sampling_session_seq_id", sampler_seq_id, least=0, most=MOST_NUMBER)
        sampler_id = "" if sampler_seq_id is None else sampler_id_of(model.session_id, sampler_seq_id)
        work = SaveWork(
            weights=kind,
            path="" if name is None else str(WeightsPath.make(model_id, kind, name)),
            sampler_id=sampler_id,
            inflight=inflight,
            ttl_s=ttl_s,
            overwrite=overwrite,
            recipients=recipients,
            user_metadata=user_metadata,
        )
        return await self._parts.models.submit(tenant_id, model_id, seq_id, JournalKind.SAVE, work)

    async def load_weights(
        self,
        tenant_id: str,
        *,
        path: str,
        optimizer: bool,
        session_id: str = "",
        model_seq_id: int | None = None,
        model_id: str = "",
        seq_id: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
    ) -> Accepted:
        """Load saved weights into a new model (`session_id`, `model_seq_id`), or into an existing one (`model_id`,
        `seq_id`)."""
        models = self._parts.models
        if model_seq_id is not None:
            return await models.load_new(
                tenant_id,
                session_id,
                model_seq_id=model_seq_id,
                path=path,
                optimizer=optimizer,
                user_metadata=user_metadata,
            )
        if seq_id is None:
            raise Refusal(RefusalKind.INVALID, "The request has no seq_id.", do="Give one.", param="seq_id")
        model = await models.model(tenant_id, model_id)
        _, source = await self._parts.weights.find_for_training(tenant_id, path)
        if LoraWish(**source.lora).rank != model.lora.rank:
            raise Refusal(
                RefusalKind.INVALID,
                "These weights do not fit the model.",
                got=f"rank {source.lora['rank']}; the model has rank {model.lora.rank}",
                do="Load them into a new model.",
                param="path",
            )
        work = LoadWork(path=path, optimizer=optimizer)
        return await models.submit(tenant_id, model_id, seq_id, JournalKind.LOAD, work)

    async def create_sampler(
        self, tenant_id: str, session_id: str, *, sampler_seq_id: int, base_model: str = "", path: str = ""
    ) -> str:
        """Create a sampler for the base model or for saved weights, and return its id."""
        return await self._parts.samples.create_sampler(
            tenant_id, session_id, sampler_seq_id=sampler_seq_id, base_model=base_model, path=path
        )

    async def sample(
        self, tenant_id: str, sampler_id: str, *, seq_id: int, prompt_ids: NDArray[np.int32], wish: SamplingWish
    ) -> Accepted:
        return await self._parts.samples.sample(tenant_id, sampler_id, seq_id=seq_id, prompt_ids=prompt_ids, wish=wish)

    def sample_at_once(
        self, tenant_id: str, *, model: str, prompt_ids: NDArray[np.int32], wish: SamplingWish
    ) -> AsyncIterator[DrawnPiece | Sample | SampleResult]:
        """Draw without a session, for the OpenAI API, whose clients wait for the answer on the connection. `model`:
        `base`, a run's `NAME`, `NAME@latest`, `NAME@K`, an alias or a `tinker://` path. The last item is the result.
        Cancelling the iteration stops the drawing."""
        return self._parts.samples.sample_at_once(tenant_id, model=model, prompt_ids=prompt_ids, wish=wish)

    def waiting_reason(self) -> str:
        """Return why samples wait now, in one sentence; "" = they are being drawn."""
        return self._parts.sampling.reason()

    async def resolve(self, tenant_id: str, model: str) -> str:
        """Return the exact name of the weights that `model` means now, for example `run@12`."""
        return await self._parts.samples.resolve(tenant_id, model)

    async def outcome(self, tenant_id: str, request_id: str, *, wait_s: float) -> Outcome | Pending:
        """Wait up to `wait_s` seconds for the outcome of a request. It can be read again for a while afterwards."""
        parts = self._parts
        found = await parts.core.futures.outcome(tenant_id, request_id, wait_s=wait_s)
        if found is not None:
            return found
        owner_id = parts.core.futures.owner(request_id)
        is_training = parts.core.sessions.model(tenant_id, owner_id) is not None
        return Pending(reason=parts.work.reason(owner_id) if is_training else parts.sampling.reason())

    async def refused(self, tenant_id: str, model_id: str, *, seq_id: int, spoils: bool) -> None:
        """Record that the API refused a training request, so that later ones do not wait for it. `spoils`: the request
        was to add to the gradient, so the next optim_step fails and drops the gradient. The model may be unknown."""
        await self._parts.models.refused(tenant_id, model_id, seq_id=seq_id, spoils=spoils)

    async def finished_samples(
        self, tenant_id: str, sampler_id: str, *, clone: int, cursor: int, wait_s: float
    ) -> tuple[tuple[tuple[str, bool], ...], int]:
        """Return ((request id, True if it failed) of each request that ended since `cursor`, the next cursor). The
        first cursor is 0. Only requests of this clone count: those with seq_id // 10**9 == `clone`. The same cursor
        may be asked for again."""
        await self._parts.samples.sampler(tenant_id, sampler_id)
        return await self._parts.core.futures.ended(sampler_id, clone=clone, cursor=cursor, wait_s=wait_s)

    async def retrieved(self, tenant_id: str, request_ids: Sequence[str]) -> None:
        """Record that the client has read these outcomes. The hub may delete read outcomes. Unknown ids are ignored."""
        await self._parts.core.futures.note_read(tenant_id, request_ids)

    async def cancel(self, tenant_id: str, request_id: str) -> None:
        """Stop a sample request, which then fails. Training requests continue, because later ones build on them. Does
        nothing if the request has ended."""
        parts = self._parts
        row = await parts.core.store.read(find_request_by_id, request_id)
        if row is None or row.tenant_id != tenant_id:
            raise Refusal(
                RefusalKind.NOT_FOUND,
                "There is no such request.",
                do="Use the request id that the hub gave to this token's program.",
            )
        if parts.core.sessions.sampler(tenant_id, row.owner_id) is not None:
            await parts.core.identities.finished(parts.sampling.cancel(request_id))

    def drawing_tenants(self) -> set[str]:
        """Return the tenants with unfinished sample requests."""
        return self._parts.sampling.tenants()

    async def stop_drawing(self, tenant_id: str) -> None:
        """Fail a tenant's unfinished sample requests, because it may no longer use the hub."""
        await self._parts.sampling.cancel_all(tenant_id, "The hub's operator has ended this tenant's access.")

    async def sampler(self, tenant_id: str, sampler_id: str) -> tuple[str, str]:
        """Return a sampler's (alias of its base model, path of its weights or "")."""
        row = (await self._parts.samples.sampler(tenant_id, sampler_id)).row
        return row.base_model, row.path

    async def model(self, tenant_id: str, model_id: str) -> ModelInfo:
        """Return a model of an open session, or a model with saved weights."""
        live = self._parts.core.sessions.model(tenant_id, model_id)
        if live is not None:
            return live.info
        row = await self._parts.core.store.read(find_model, model_id)
        if row is None or row.tenant_id != tenant_id:
            raise await self._parts.models.absent(tenant_id, model_id, "model")
        return info_of(row)

    async def models(self, tenant_id: str) -> tuple[ModelInfo, ...]:
        sessions = self._parts.core.sessions
        rows = await self._parts.core.store.read(read_models, tenant_id)
        live = (sessions.model(tenant_id, row.model_id) for row in rows)
        return tuple(model.info if model else info_of(row) for row, model in zip(rows, live, strict=True))

    async def checkpoints(self, tenant_id: str, model_id: str | None = None) -> tuple[TenantCheckpoint, ...]:
        return await self._parts.weights.list(tenant_id, model_id)

    async def weights(self, tenant_id: str, path: str) -> TenantCheckpoint:
        return await self._parts.weights.describe(tenant_id, path)

    async def weights_files(self, tenant_id: str, path: str) -> Mapping[str, Path]:
        """Return the files of external weights by name."""
        return await self._parts.weights.files(tenant_id, path)

    async def delete_weights(self, tenant_id: str, path: str) -> None:
        await self._parts.core.identities.finished(self._parts.weights.delete(tenant_id, path))

    async def set_ttl(self, tenant_id: str, path: str, ttl_s: float | None) -> None:
        await self._parts.weights.set_ttl(tenant_id, path, ttl_s)
