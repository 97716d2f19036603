"""End sessions without heartbeats, and delete old outcomes, expired weights and unused samplers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from echo_hub.store.tenant_reading import (
    drop_tenant_outcomes,
    forget_tenant_sessions,
    read_checkpoint_bytes,
    read_result_bytes,
)
from echo_hub.store.tenant_records import TenantSamplerEnded, TenantSessionEnded
from echo_hub.tenants.core import TenantCore
from echo_hub.tenants.model_work import ModelWork
from echo_hub.tenants.sampling import TenantSampling
from echo_hub.tenants.sessions import LiveSampler, LiveSession
from echo_hub.tenants.versions import version_directory
from echo_hub.tenants.weights import Weights

log = logging.getLogger(__name__)

EVERY_S: Final = 10.0
COUNT_EVERY_S: Final = 300.0
"""Seconds between two counts of stored results. A count reads one row for each result: 200,000 rows in 2 s."""
SESSION_KEPT_S: Final = 86_400.0
"""Seconds for which an ended session is remembered, so that its clients learn that it has ended."""
JUMP_S: Final = 60.0
"""Largest change of (clock - elapsed time), in seconds, between two checks. Above it, the clock has jumped."""
DOUBT_S: Final = 3_600.0
"""Seconds without deletions by date after a jump of the clock. In this time, an operator may correct the clock."""
NEWEST_KEPT: Final = 4
"""Newest samplers of a session that are kept, however long they were not used."""
MOST_UNNAMED: Final = 256
"""Largest number of unnamed versions of one tenant that stay available to nodes. Above this number, the hub ends the
least recently used samplers of unnamed versions.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantTimes:
    """Times after which something ends, in seconds: see `echo_hub.config.tenants_section`."""

    session_expires_s: float
    result_kept_s: float
    unread_result_kept_s: float


class TenantHousekeeping:
    """Ends sessions and deletes what has grown old. `run` does it every few seconds."""

    def __init__(
        self, core: TenantCore, times: TenantTimes, *, work: ModelWork, sampling: TenantSampling, weights: Weights
    ) -> None:
        self._sessions = core.sessions
        self._store = core.store
        self._writer = core.writer
        self._futures = core.futures
        self._adapters = core.adapters
        self._quotas = core.quotas
        self._root = core.directory.root
        self._times = times
        self._work = work
        self._sampling = sampling
        self._weights = weights
        self._ahead: float | None = None
        """Clock minus elapsed time at the last check, in seconds."""
        self._deletes_from = 0.0
        """Elapsed time from which on deletion by date is allowed."""
        self._counts_from = 0.0
        """Elapsed time from which on stored results are counted again."""

    async def run(self) -> None:
        while True:
            await self.tidy()
            await asyncio.sleep(EVERY_S)

    async def tidy(self) -> None:
        now = time.monotonic()
        for session in self._sessions.all():
            if session.last_seen + self._times.session_expires_s <= now:
                await self.end(session)
            else:
                await self._end_idle_samplers(session, now)
        for tenant_id in {session.tenant_id for session in self._sessions.all()}:
            await self._end_samplers_for_space(tenant_id)
        await self._writer.flush()
        await self._delete_old(now)
        if now >= self._counts_from:
            self._counts_from = now + COUNT_EVERY_S
            await self._count_results()

    async def _count_results(self) -> None:
        found = Counter[str]()
        after: float | None = 0.0
        while after is not None:
            part, after = await self._store.read(read_result_bytes, after=after)
            found.update(part)
        self._quotas.result_bytes = found

    async def _delete_old(self, now: float) -> None:
        wall = time.time()
        if self._doubts_clock(wall, now):
            return
        await self._weights.remove_expired()
        await self._store.write(
            drop_tenant_outcomes,
            read_before=wall - self._times.result_kept_s,
            ended_before=wall - self._times.unread_result_kept_s,
        )
        await self._store.write(forget_tenant_sessions, wall - SESSION_KEPT_S)

    def _doubts_clock(self, wall: float, now: float) -> bool:
        """Return True if the clock has jumped within the last `DOUBT_S` seconds. A clock that was set wrong would make
        weights and outcomes look expired."""
        jump = 0.0 if self._ahead is None else wall - now - self._ahead
        self._ahead = wall - now
        if abs(jump) > JUMP_S:
            self._deletes_from = now + DOUBT_S
            log.warning(
                "The clock has jumped by %.0f s. For an hour, no weights and outcomes of tenants are deleted.", jump
            )
        return now < self._deletes_from

    async def end(self, session: LiveSession) -> None:
        """End a session: forget its models and samplers, and fail its unfinished requests."""
        if self._sessions.remove(session.session_id) is None:
            return
        for model_id in session.models:
            self._work.remove(model_id)
        await self._writer.commit(TenantSessionEnded(session_id=session.session_id, ended_at=time.time()))
        for request_id in self._futures.of_session(session.session_id):
            await self._sampling.stop(request_id)
            self._futures.wake(request_id)
        for sampler_id, sampler in session.samplers.items():
            self._adapters.release(sampler.row.policy_version, sampler_id)

    async def _end_idle_samplers(self, session: LiveSession, now: float) -> None:
        """End samplers of unnamed versions that were not used for long: each has a version of its own on disk."""
        for sampler in _unnamed([session])[:-NEWEST_KEPT]:
            if sampler.last_used + self._times.session_expires_s <= now:
                await self._end_sampler(session, sampler)

    async def _end_samplers_for_space(self, tenant_id: str) -> None:
        """End a tenant's least recently used unnamed samplers while it has too many, or while its weights take more
        than its disk space."""
        limit = self._quotas.limits_of(tenant_id).max_checkpoint_bytes
        sessions = {one.session_id: one for one in self._sessions.all() if one.tenant_id == tenant_id}
        unnamed = _unnamed(sessions.values())
        if len(unnamed) <= NEWEST_KEPT:
            return
        surplus = len(unnamed) - MOST_UNNAMED
        sizes = await asyncio.to_thread(self._sizes, unnamed)
        saved = await self._store.read(read_checkpoint_bytes, tenant_id)
        excess = saved + sum(sizes) - limit if limit else 0
        for sampler, size in zip(unnamed[:-NEWEST_KEPT], sizes, strict=False):
            if excess <= 0 and surplus <= 0:
                return
            if await self._end_sampler(sessions[sampler.row.session_id], sampler):
                excess -= size
                surplus -= 1

    def _sizes(self, samplers: Sequence[LiveSampler]) -> list[int]:
        """Return the disk space of each sampler's version."""
        return [_size(version_directory(self._root, sampler.row.policy_version)) for sampler in samplers]

    async def _end_sampler(self, session: LiveSession, sampler: LiveSampler) -> bool:
        """End an unnamed sampler, unless it has unfinished requests. Return True if it has ended."""
        sampler_id = sampler.row.sampler_id
        if self._futures.has_of(sampler_id) or session.samplers.pop(sampler_id, None) is None:
            return False
        await self._writer.commit(TenantSamplerEnded(sampler_id=sampler_id, ended_at=time.time()))
        self._adapters.release(sampler.row.policy_version, sampler_id)
        return True


def _size(folder: Path) -> int:
    """Return the bytes of a folder's files; 0 for a folder that is being deleted meanwhile."""
    try:
        return sum(file.stat().st_size for file in folder.glob("*"))
    except FileNotFoundError:
        return 0


def _unnamed(sessions: Iterable[LiveSession]) -> list[LiveSampler]:
    """Return the samplers of unnamed versions in these sessions, the least recently used one first."""
    samplers = [sampler for session in sessions for sampler in session.samplers.values()]
    own = [sampler for sampler in samplers if sampler.row.policy_version and not sampler.row.path]
    return sorted(own, key=lambda sampler: (sampler.last_used, sampler.row.policy_version))
