"""The second half of save_weights_for_sampler: publish the exported version, and answer the request when samples can be
drawn with it.

The first half, the export, takes its turn among the model's requests. This half waits for nodes, which may take long,
so it does not hold up later requests. The request's journal row stays until this half ends, so a restarted hub can
continue with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from echo_hub.store.tenant_records import CheckpointRemoved, JournalDropped, SamplerRow, TenantRecord, VersionRow
from echo_hub.tenants.core import TenantCore
from echo_hub.tenants.outcomes import Failed, WeightsSaved
from echo_hub.tenants.refusal import Refusal
from echo_hub.tenants.sessions import LiveModel, LiveSampler, LiveSession
from echo_hub.tenants.stored import SaveWork
from echo_hub.tenants.weights import Weights
from echo_shared.errors import EchoError

log = logging.getLogger(__name__)


class VersionSaves:
    """Publications in progress, each in a task of its own."""

    def __init__(self, core: TenantCore, weights: Weights) -> None:
        self._identities = core.identities
        self._futures = core.futures
        self._adapters = core.adapters
        self._sessions = core.sessions
        self._weights = weights
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(
        self, model: LiveModel, request_id: str, seq_id: int, work: SaveWork, records: Sequence[TenantRecord]
    ) -> None:
        """Publish the version that is among the committed `records`."""
        version = next(record.policy_version for record in records if isinstance(record, VersionRow))
        self._adapters.hold(version, request_id)
        task = asyncio.create_task(
            self._publish(model, request_id, seq_id, work, version), name=f"publish-for-{request_id}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _publish(self, model: LiveModel, request_id: str, seq_id: int, work: SaveWork, version: int) -> None:
        done = JournalDropped(model_id=model.model_id, seq_id=seq_id)
        try:
            await self._adapters.ready(version)
            async with self._identities.only(work.path or work.sampler_id, -1):
                await self._answer(model, request_id, work, version, done)
        except EchoError as error:
            log.warning("version %d of model %s cannot be published: %s", version, model.model_id, error)
            category = "user" if isinstance(error, Refusal) else "server"
            await self._futures.end(request_id, Failed(error=str(error), category=category), done)
        except Exception as error:
            log.exception("version %d of model %s cannot be published", version, model.model_id)
            await self._futures.end(request_id, Failed(error=f"The hub failed: {error!r}", category="unknown"), done)
        # A hub that stops cancels this task, and keeps the version: the next start publishes it again.
        self._adapters.release(version, request_id)

    async def _answer(
        self, model: LiveModel, request_id: str, work: SaveWork, version: int, done: JournalDropped
    ) -> None:
        if not work.path:
            await self._weights.check_new_sampler(work.sampler_id)
        session = self._sessions.session(model.tenant_id, model.session_id)
        if session is None or not self._futures.is_unfinished(request_id):
            return  # The session has ended, so no client asks for the outcome.
        if work.path:
            replaced = await self._weights.check_free(work)
            row = await self._weights.row_of_version(model, work, version)
            self._adapters.hold(version, work.path)
            records = self._weights.replacing(row, replaced)
            await self._futures.end(request_id, WeightsSaved(path=work.path), *records, done)
            for record in records:
                if isinstance(record, CheckpointRemoved):
                    await self._weights.remove_files(record)
            return
        now = time.time()
        sampler = SamplerRow(
            sampler_id=work.sampler_id,
            tenant_id=model.tenant_id,
            session_id=model.session_id,
            base_model=model.base_model,
            path="",
            model_id=model.model_id,
            policy_version=version,
            inflight=work.inflight,
            made_at=now,
        )
        self._adapters.hold(version, work.sampler_id)
        session.samplers[work.sampler_id] = LiveSampler(row=sampler, last_used=time.monotonic(), newest_seq={})
        await self._futures.end(request_id, WeightsSaved(sampler_id=work.sampler_id), sampler, done)
        if work.inflight:
            self._follow(session, sampler)

    def _follow(self, session: LiveSession, newest: SamplerRow) -> None:
        """Release the versions of the model's earlier inflight samplers: their next requests are drawn with the newest
        version."""
        for sampler in session.samplers.values():
            row = sampler.row
            is_older = row.inflight and row.model_id == newest.model_id and row.policy_version < newest.policy_version
            if is_older:
                self._adapters.release(row.policy_version, row.sampler_id)
