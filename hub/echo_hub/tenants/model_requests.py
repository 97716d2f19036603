"""Accept training requests: check them, commit them, and add them to the models' work."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Final

from echo_hub.store.tenant_reading import find_request, find_tenant_session
from echo_hub.store.tenant_records import FAILED, JournalRow, ModelRow, RequestRow
from echo_hub.tenants.core import Offer, TenantCore
from echo_hub.tenants.gradient_state import GradientState, JournalKind
from echo_hub.tenants.model_work import ModelWork
from echo_hub.tenants.order import ModelOrder
from echo_hub.tenants.outcomes import Accepted, Failed
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import ForwardBackward, LoraWish
from echo_hub.tenants.sessions import (
    LiveModel,
    LiveSession,
    TrainingArrival,
    model_id_of,
    new_request_id,
    session_id_of,
)
from echo_hub.tenants.stored import CreateWork, LoadWork, SaveWork, Work, pack_stored
from echo_hub.tenants.weights import Weights
from echo_shared.sampling.draws import derive_seed

REFUSED: Final = "refused"
"""Kind of a refused request that leaves the gradient as it is."""
MOST_NUMBER: Final = 10**9
"""Largest number of a model or sampler in its session."""
MOST_SEQ: Final = 2**62
MOST_ABOUT: Final = 65_536
"""Largest number of characters with which a client may describe a session or model (tags, metadata)."""
MOST_BODY_BYTES: Final = 64_000_000
MOST_JOURNAL_BYTES: Final = 1_000_000_000
"""Limit on the bytes of waiting requests of one model, and on the bytes of its journal between two checkpoints."""
MOST_TENANT_BYTES: Final = 4_000_000_000
"""Limit on the same bytes of all models of one tenant together."""
_SEEDS: Final = 2**31
_LATE: Final = "came too late: later requests have run or failed"


class ModelRequests:
    """The training requests of all tenants."""

    def __init__(self, core: TenantCore, offer: Offer, *, work: ModelWork, weights: Weights, max_rank: int) -> None:
        self._sessions = core.sessions
        self._store = core.store
        self._writer = core.writer
        self._futures = core.futures
        self._quotas = core.quotas
        self._identities = core.identities
        self._base_names = offer.base_names
        self._secret = offer.secret
        self._work = work
        self._weights = weights
        self._max_rank = max_rank

    async def create(
        self,
        tenant_id: str,
        session_id: str,
        *,
        model_seq_id: int,
        base_model: str,
        lora: LoraWish,
        user_metadata: Mapping[str, str],
    ) -> Accepted:
        session = await self.session(tenant_id, session_id)
        check_number("model_seq_id", model_seq_id, least=0, most=MOST_NUMBER)
        check_about("user_metadata", user_metadata)
        self.check_base(base_model)
        if not 1 <= lora.rank <= self._max_rank:
            raise Refusal(
                RefusalKind.INVALID,
                "The adapter cannot have this rank.",
                got=str(lora.rank),
                do=f"Use a rank from 1 to {self._max_rank}.",
                param="rank",
            )
        model_id = model_id_of(session_id, model_seq_id)
        seeded = replace(lora, seed=_seed(lora.seed, self._secret, model_id))
        made = self._model(session, model_id, base_model, seeded, user_metadata)
        return await self._identities.finished(
            self._submit_first(session, made, JournalKind.CREATE, CreateWork(lora=seeded))
        )

    async def load_new(
        self,
        tenant_id: str,
        session_id: str,
        *,
        model_seq_id: int,
        path: str,
        optimizer: bool,
        user_metadata: Mapping[str, str] | None,
    ) -> Accepted:
        """Accept a request to create a model from saved weights."""
        session = await self.session(tenant_id, session_id)
        check_number("model_seq_id", model_seq_id, least=0, most=MOST_NUMBER)
        _, source = await self._weights.find_for_training(tenant_id, path)
        lora = LoraWish(**source.lora)
        metadata = source.user_metadata if user_metadata is None else user_metadata
        made = self._model(session, model_id_of(session_id, model_seq_id), source.base_model, lora, metadata)
        work = LoadWork(path=path, optimizer=optimizer, lora=lora)
        return await self._identities.finished(self._submit_first(session, made, JournalKind.LOAD, work))

    async def submit(self, tenant_id: str, model_id: str, seq_id: int, kind: JournalKind, work: Work) -> Accepted:
        model = await self.model(tenant_id, model_id)
        check_number("seq_id", seq_id, least=1, most=MOST_SEQ)  # Request 0 makes the model.
        if isinstance(work, SaveWork) and work.path:
            await self._weights.check_bytes(tenant_id)
        return await self._identities.finished(self._submit(model, seq_id, kind, work))

    async def refused(self, tenant_id: str, model_id: str, *, seq_id: int, spoils: bool) -> None:
        """See `TenantService.refused`."""
        model = self._sessions.model(tenant_id, model_id)
        if model is not None:
            await self._identities.finished(self._refused(model, seq_id, spoils=spoils))

    async def session(self, tenant_id: str, session_id: str) -> LiveSession:
        found = self._sessions.session(tenant_id, session_id)
        if found is None:
            raise await self.absent(tenant_id, session_id, "session")
        found.last_seen = time.monotonic()
        return found

    async def model(self, tenant_id: str, model_id: str) -> LiveModel:
        found = self._sessions.model(tenant_id, model_id)
        if found is None:
            raise await self.absent(tenant_id, model_id, "model")
        await self.session(tenant_id, found.session_id)
        return found

    async def absent(self, tenant_id: str, owner_id: str, what: str) -> Refusal:
        """Return the refusal for a missing session, model or sampler. Other tenants' objects count as missing."""
        session_id = session_id_of(owner_id)
        row = await self._store.read(find_tenant_session, session_id)
        is_open = self._sessions.session(tenant_id, session_id) is not None
        if row is not None and row.tenant_id == tenant_id and not is_open:
            return Refusal(
                RefusalKind.GONE,
                f"The session of this {what} has ended." if what != "session" else "This session has ended.",
                got=owner_id,
                do="Open a new session. Saved weights are still there.",
            )
        return Refusal(
            RefusalKind.NOT_FOUND,
            f"There is no such {what}.",
            got=owner_id[:200],
            do=f"Use the id of a {what} that this token's programs have made.",
        )

    def check_base(self, base_model: str) -> None:
        if base_model not in self._base_names:
            raise Refusal(
                RefusalKind.INVALID,
                "The hub does not serve this model.",
                got=base_model[:200],
                do=f"Use one of: {', '.join(sorted(self._base_names))}.",
                param="base_model",
            )

    def _model(
        self, session: LiveSession, model_id: str, base_model: str, lora: LoraWish, metadata: Mapping[str, str]
    ) -> LiveModel:
        return LiveModel(
            model_id=model_id,
            tenant_id=session.tenant_id,
            session_id=session.session_id,
            base_model=base_model,
            lora=lora,
            user_metadata=dict(metadata),
            order=ModelOrder(0),
            gradient=GradientState(-1),
            last_request_at=time.time(),
        )

    async def _submit_first(self, session: LiveSession, made: LiveModel, kind: JournalKind, work: Work) -> Accepted:
        """Accept the request that makes a model."""
        async with self._identities.only(made.model_id, 0):
            known = await self._store.read(find_request, made.model_id, 0)
            if known is not None:
                return Accepted(request_id=known.request_id)
            self._quotas.check_model(made.tenant_id, len(self._sessions.models(made.tenant_id)))
            row = ModelRow(
                model_id=made.model_id,
                tenant_id=made.tenant_id,
                session_id=made.session_id,
                base_model=made.base_model,
                lora=asdict(made.lora),
                user_metadata=made.user_metadata,
                made_at=made.last_request_at,
                last_request_at=made.last_request_at,
            )
            session.models[made.model_id] = made  # Now: the limit must count models that come at the same time.
            self._work.add(made)
            try:
                return await self._commit(made, 0, kind, work, row)
            except BaseException:
                if session.models.pop(made.model_id, None) is not None:
                    self._work.remove(made.model_id)
                raise

    async def _submit(self, model: LiveModel, seq_id: int, kind: JournalKind, work: Work) -> Accepted:
        async with self._identities.only(model.model_id, seq_id):
            known = await self._store.read(find_request, model.model_id, seq_id)
            if known is not None:
                if known.kind in (REFUSED, JournalKind.SPOILED):
                    raise _used_up(seq_id, "was refused before")
                return Accepted(request_id=known.request_id)
            if model.order.is_late(seq_id):
                raise _used_up(seq_id, _LATE)
            if kind in (JournalKind.PASS, JournalKind.FORWARD):
                _check_journal(model, self._sessions.models(model.tenant_id), adds=kind is JournalKind.PASS)
            return await self._commit(model, seq_id, kind, work)

    async def _commit(self, model: LiveModel, seq_id: int, kind: JournalKind, work: Work, *rows: ModelRow) -> Accepted:
        request = RequestRow(
            request_id=new_request_id(),
            tenant_id=model.tenant_id,
            session_id=model.session_id,
            owner_id=model.model_id,
            seq_id=seq_id,
            kind=kind,
            made_at=time.time(),
        )
        tokens = sum(len(datum.input_ids) for datum in work.data) if isinstance(work, ForwardBackward) else 0
        with self._quotas.accepting(model.tenant_id, request.request_id, tokens, now=request.made_at):
            body = await asyncio.to_thread(pack_stored, work)
            if len(body) > MOST_BODY_BYTES:
                raise Refusal(
                    RefusalKind.TOO_LARGE,
                    "The request is too large.",
                    got=f"{len(body):,} bytes, compressed",
                    do=f"Send at most {MOST_BODY_BYTES:,} bytes at a time, in several requests.",
                )
            if self._sessions.any_model(model.model_id) is None:
                # The session has ended meanwhile. A row that is written after its end would wait for ever.
                raise await self.absent(model.tenant_id, model.model_id, "model")
            journal = JournalRow(model_id=model.model_id, seq_id=seq_id, kind=kind, body=body)
            await self._writer.commit(*rows, request, journal)
        self._futures.add(request.request_id, tenant_id=model.tenant_id, owner_id=model.model_id, tokens=tokens)
        model.last_request_at = request.made_at
        if self._sessions.any_model(model.model_id) is None:
            self._futures.wake(request.request_id)  # The session has ended meanwhile.
        elif model.order.is_late(seq_id):
            await self._futures.end(request.request_id, Failed(error=str(_used_up(seq_id, _LATE)), category="user"))
        else:
            arrival = TrainingArrival(request_id=request.request_id, kind=kind, num_bytes=len(body))
            self._work.arrive(model, seq_id, arrival)
        return Accepted(request_id=request.request_id)

    async def _refused(self, model: LiveModel, seq_id: int, *, spoils: bool) -> None:
        async with self._identities.only(model.model_id, seq_id):
            known = await self._store.read(find_request, model.model_id, seq_id)
            if known is not None or model.order.is_late(seq_id) or not 1 <= seq_id <= MOST_SEQ:
                return
            now, request_id = time.time(), new_request_id()
            row = RequestRow(
                request_id=request_id,
                tenant_id=model.tenant_id,
                session_id=model.session_id,
                owner_id=model.model_id,
                seq_id=seq_id,
                kind=JournalKind.SPOILED if spoils else REFUSED,
                made_at=now,
                state=FAILED,
                ended_at=now,
            )
            spoiled = JournalRow(model_id=model.model_id, seq_id=seq_id, kind=JournalKind.SPOILED)
            await self._writer.commit(row, *([spoiled] if spoils else []))
            if self._sessions.any_model(model.model_id) is not None:
                kind = JournalKind.SPOILED if spoils else None
                self._work.arrive(model, seq_id, TrainingArrival(request_id=request_id, kind=kind))


def check_about(name: str, about: Mapping[str, object]) -> None:
    """Raise Refusal if a client's description of its work is too long: the hub stores it."""
    size = len(json.dumps(about, default=str))
    if size > MOST_ABOUT:
        raise Refusal(
            RefusalKind.TOO_LARGE,
            f"The text {name} is too long.",
            got=f"{size:,} characters",
            do=f"Use at most {MOST_ABOUT:,}.",
            param=name,
        )


def check_number(name: str, number: int, *, least: int, most: int) -> None:
    """Raise Refusal if a client's number, such as a seq_id, is out of range."""
    if not least <= number <= most:
        raise Refusal(
            RefusalKind.INVALID,
            f"The {name} is out of range.",
            got=str(number),
            do=f"Use a number from {least} to {most}.",
            param=name,
        )


def _seed(given: int | None, secret: str, model_id: str) -> int:
    return derive_seed(secret, model_id) % _SEEDS if given is None else given


def _check_journal(model: LiveModel, all_models: Sequence[LiveModel], *, adds: bool) -> None:
    """Raise Refusal if one model, or all models of its tenant, have too many bytes in waiting requests and in the
    journal since the last checkpoint. `adds`: the request adds to the gradient."""
    of_tenant = sum(one.bytes_waiting + one.bytes_since_cover for one in all_models)
    if of_tenant > MOST_TENANT_BYTES:
        raise Refusal(
            RefusalKind.TOO_MANY,
            "The hub holds too much data of your models.",
            got=f"{of_tenant:,} bytes, compressed; {MOST_TENANT_BYTES:,} are allowed for all models together",
            do="Wait until some requests are done, call optim_step for each model, or end sessions.",
            retry_after_s=1.0,
        )
    waiting = model.bytes_waiting
    if waiting > MOST_JOURNAL_BYTES:
        raise Refusal(
            RefusalKind.TOO_MANY,
            "Too much data of this model waits.",
            got=f"{waiting:,} bytes, compressed; {MOST_JOURNAL_BYTES:,} are allowed",
            do="Wait until some requests are done, and ask again.",
            retry_after_s=1.0,
        )
    if adds and model.bytes_since_cover > MOST_JOURNAL_BYTES:
        raise Refusal(
            RefusalKind.INVALID,
            "The gradient of this model holds too much data.",
            got=f"{model.bytes_since_cover:,} bytes, compressed; {MOST_JOURNAL_BYTES:,} are allowed",
            do="Call optim_step more often.",
        )


def _used_up(seq_id: int, why: str) -> Refusal:
    return Refusal(
        RefusalKind.INVALID,
        f"The request with this seq_id {why}.",
        got=f"seq_id {seq_id}",
        do="Send the request again with the next seq_id.",
        param="seq_id",
    )
