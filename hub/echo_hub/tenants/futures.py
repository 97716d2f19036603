"""Outcomes of requests, and the clients that wait for them.

Unfinished requests are in memory, outcomes only in the database. A tenant that asks for another tenant's request
gets the same answer as for an unknown request id.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakValueDictionary

from echo_hub.store.async_store import AsyncStore
from echo_hub.store.tenant_reading import find_request_by_id, read_ended_requests
from echo_hub.store.tenant_records import DONE, FAILED, WAITING, RequestRead, TenantRecord, TenantTallied
from echo_hub.tenants.outcomes import Failed, Outcome
from echo_hub.tenants.quotas import Quotas
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import PassResult, SampleResult
from echo_hub.tenants.sessions import session_id_of
from echo_hub.tenants.stored import pack_stored, unpack_outcome
from echo_hub.tenants.writing import TenantWriter

CLONE: Final = 10**9
"""Number of consecutive seq_ids that belong to each clone of a sampler (a client's copy of it)."""
INLINE_BYTES: Final = 16_384
"""Outcomes with fewer bytes than this are packed and unpacked on the event loop: to use a thread would take longer."""
ENDED_AT_ONCE: Final = 1_000
"""Largest number of ended requests in one answer."""
MOST_WAIT_S: Final = 60.0
"""Longest wait for an outcome. A caller that wants to wait longer asks again."""


@dataclass(slots=True)
class _Unfinished:
    tenant_id: str
    owner_id: str
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Futures:
    """All unfinished requests, and access to the outcomes of finished ones."""

    def __init__(self, store: AsyncStore, writer: TenantWriter, quotas: Quotas) -> None:
        self._store = store
        self._writer = writer
        self._quotas = quotas
        self._unfinished: dict[str, _Unfinished] = {}
        self._ending: set[str] = set()
        """Requests whose outcome is being committed."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._news: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()
        """For each sampler id: the event that is set when a request of that sampler ends. It exists only while a caller
        waits for it."""

    def __len__(self) -> int:
        return len(self._unfinished)

    def is_unfinished(self, request_id: str) -> bool:
        """Return True for an unfinished request whose outcome is not being committed."""
        return request_id in self._unfinished and request_id not in self._ending

    def owner(self, request_id: str) -> str:
        """Return the id of an unfinished request's model or sampler; "" if no unfinished request has this id."""
        found = self._unfinished.get(request_id)
        return "" if found is None else found.owner_id

    def of_session(self, session_id: str) -> list[str]:
        """Return the unfinished requests of a session."""
        return [each for each, found in self._unfinished.items() if session_id_of(found.owner_id) == session_id]

    def has_of(self, owner_id: str) -> bool:
        """Return True if a model or sampler has unfinished requests."""
        return any(found.owner_id == owner_id for found in self._unfinished.values())

    def add(self, request_id: str, *, tenant_id: str, owner_id: str, tokens: int) -> None:
        """Add a request that the database holds as unfinished. `tokens` counts certain usage, such as prompt tokens."""
        self._unfinished[request_id] = _Unfinished(tenant_id, owner_id)
        self._quotas.begin(tenant_id, request_id, tokens)

    async def end(self, request_id: str, outcome: Outcome, *more: TenantRecord) -> None:
        """Commit the outcome and further records, and wake the callers that wait for the outcome. Cancelling stops
        neither."""
        self._ending.add(request_id)
        task = asyncio.create_task(self._end(request_id, outcome, more), name=f"end-{request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def close(self) -> None:
        """Wait until the outcomes that are being committed are on disk."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _end(self, request_id: str, outcome: Outcome, more: Sequence[TenantRecord]) -> None:
        state = FAILED if isinstance(outcome, Failed) else DONE
        packed = await asyncio.to_thread(pack_stored, outcome) if _is_large(outcome) else pack_stored(outcome)
        await self._writer.commit_end(request_id, state=state, outcome=packed, ended_at=time.time(), more=more)
        self.wake(request_id, sum(record.tokens for record in more if isinstance(record, TenantTallied)))
        self._ending.discard(request_id)

    def wake(self, request_id: str, tokens: int = 0) -> None:
        """Wake the callers that wait for this request, and count its `tokens` in the tenant's quota. Call it after the
        database has stored the request's outcome."""
        found = self._unfinished.pop(request_id, None)
        if found is None:
            return
        found.ended.set()
        self._quotas.end(request_id, tokens, now=time.time())
        if (news := self._news.pop(found.owner_id, None)) is not None:
            news.set()

    async def outcome(self, tenant_id: str, request_id: str, *, wait_s: float) -> Outcome | None:
        """Wait for an outcome; None = there is none yet. See `TenantService.outcome`."""
        found = self._unfinished.get(request_id)
        if found is not None:
            _check(found.tenant_id, tenant_id)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(found.ended.wait(), _bounded(wait_s))
            if not found.ended.is_set():
                return None
        row = await self._store.read(find_request_by_id, request_id)
        _check(row.tenant_id if row else "", tenant_id)
        assert row is not None
        if row.state == WAITING:  # Committed; another task is about to add it to `_unfinished`.
            return None
        if row.outcome is None:
            raise Refusal(
                RefusalKind.GONE,
                "The outcome of this request is no longer kept.",
                got=request_id,
                do="Send the request again, in an open session.",
            )
        if row.read_at is None:
            self._writer.later(RequestRead(request_id=request_id, read_at=time.time()))
        if len(row.outcome) < INLINE_BYTES:
            return unpack_outcome(row.outcome)
        return await asyncio.to_thread(unpack_outcome, row.outcome)

    async def ended(
        self, sampler_id: str, *, clone: int, cursor: int, wait_s: float
    ) -> tuple[tuple[tuple[str, bool], ...], int]:
        """See `TenantService.finished_samples`."""
        seq_ids = range(clone * CLONE, (clone + 1) * CLONE)
        loop = asyncio.get_running_loop()
        until = loop.time() + _bounded(wait_s)
        while True:
            news = self._news.setdefault(sampler_id, asyncio.Event())
            found = await self._store.read(
                read_ended_requests, sampler_id, after=cursor, seq_ids=seq_ids, limit=ENDED_AT_ONCE
            )
            if found:
                return tuple((request_id, failed) for request_id, failed, _ in found), found[-1][2]
            try:
                await asyncio.wait_for(news.wait(), until - loop.time())
            except TimeoutError:
                return (), cursor

    async def note_read(self, tenant_id: str, request_ids: Sequence[str]) -> None:
        """Record that the client has read these outcomes. Ignores unknown ids and other tenants' requests."""
        now, read = time.time(), []
        for request_id in request_ids:
            row = await self._store.read(find_request_by_id, request_id)
            if row is not None and row.tenant_id == tenant_id and row.state != WAITING and row.read_at is None:
                read.append(RequestRead(request_id=request_id, read_at=now))
        for record in read:
            self._writer.later(record)


def _bounded(wait_s: float) -> float:
    return min(max(0.0, wait_s), MOST_WAIT_S)


def _is_large(outcome: Outcome) -> bool:
    is_large_sample = isinstance(outcome, SampleResult) and outcome.num_bytes >= INLINE_BYTES
    return is_large_sample or isinstance(outcome, PassResult)


def _check(owner: str, tenant_id: str) -> None:
    if owner != tenant_id:
        raise Refusal(
            RefusalKind.NOT_FOUND,
            "There is no such request.",
            do="Use the request id that the hub gave to this token's program.",
        )
