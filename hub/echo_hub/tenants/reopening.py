"""Load the tenants' sessions, models and unfinished requests from the database when the hub starts.

All sessions get their full time until they expire: while the hub did not run, their clients could not send heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from echo_hub.store.tenant_reading import (
    find_journal_row,
    find_request_by_id,
    read_checkpoint_directories,
    read_live_tenants,
    read_live_versions,
    read_newest_tenant_version,
    read_requests_from,
    read_saved_versions,
    read_waiting_requests,
)
from echo_hub.store.tenant_records import WAITING, ModelRow, RequestRow, VersionRow
from echo_hub.tenants.core import TenantCore
from echo_hub.tenants.gradient_state import GradientState, JournalKind
from echo_hub.tenants.model_requests import REFUSED
from echo_hub.tenants.model_work import ModelWork
from echo_hub.tenants.order import ModelOrder
from echo_hub.tenants.requests import LoraWish
from echo_hub.tenants.sample_requests import SAMPLE, SampleRequests
from echo_hub.tenants.sessions import LiveModel, LiveSampler, LiveSession, TrainingArrival
from echo_hub.tenants.stored import SampleWork, SaveWork, unpack_stored
from echo_hub.tenants.version_saves import VersionSaves
from echo_hub.tenants.versions import version_directory
from echo_hub.tenants.weights import WEIGHTS_FOLDER

log = logging.getLogger(__name__)

VERSIONS_APART: Final = 4_096
"""Largest number of version numbers that a start skips. After a backup was restored, nodes may still hold versions that
the database no longer knows; no new version may have such a number."""


class Reopening:
    """Loads sessions and requests from the database into the parts of the service. Used once, before the parts run."""

    def __init__(self, core: TenantCore, *, work: ModelWork, saves: VersionSaves, samples: SampleRequests) -> None:
        self._root = core.directory.root
        self._store = core.store
        self._sessions = core.sessions
        self._futures = core.futures
        self._adapters = core.adapters
        self._work = work
        self._saves = saves
        self._samples = samples

    async def reopen(self) -> None:
        newest = await self._store.read(read_newest_tenant_version)
        self._adapters.begin_after(newest + secrets.randbelow(VERSIONS_APART) if newest else 0)
        versions = {row.policy_version: row for row in await self._store.read(read_live_versions)}
        directories = await self._store.read(read_checkpoint_directories)
        await asyncio.to_thread(self._delete_unknown, versions, directories)
        await self._reopen_sessions()
        waiting = await self._store.read(read_waiting_requests)
        for request in waiting:
            await self._reopen_request(request, versions)
        await self._hold_saved(versions)
        if waiting:
            log.info("tenants: %d requests are unfinished", len(waiting))

    async def _reopen_sessions(self) -> None:
        live, now = await self._store.read(read_live_tenants), time.monotonic()
        found = {
            row.session_id: LiveSession(session_id=row.session_id, tenant_id=row.tenant_id, last_seen=now)
            for row in live.sessions
        }
        for session in found.values():
            self._sessions.add(session)
        for row in live.models:
            model = found[row.session_id].models[row.model_id] = _model(row)
            self._work.add(model)
            for mark in await self._store.read(read_requests_from, row.model_id, row.next_seq):
                kind = None if mark.kind == REFUSED else JournalKind(mark.kind)
                self._work.arrive(model, mark.seq_id, TrainingArrival(request_id=mark.request_id, kind=kind))
        for sampler in live.samplers:
            if sampler.ended_at is None:
                found[sampler.session_id].samplers[sampler.sampler_id] = LiveSampler(row=sampler, last_used=now)
        for session in found.values():
            self._hold_of(session)

    def _hold_of(self, session: LiveSession) -> None:
        """Mark the versions of a session's samplers as in use. For inflight samplers of a model, which always draw with
        its newest version, only this version is needed."""
        newest: dict[str, int] = {}
        rows = [sampler.row for sampler in session.samplers.values()]
        for row in rows:
            if row.inflight:
                newest[row.model_id] = max(newest.get(row.model_id, 0), row.policy_version)
        for row in rows:
            if not row.inflight or row.policy_version == newest[row.model_id]:
                self._adapters.hold(row.policy_version, row.sampler_id)

    async def _reopen_request(self, request: RequestRow, versions: Mapping[int, VersionRow]) -> None:
        if self._sessions.session(request.tenant_id, request.session_id) is None:
            return
        add = {"tenant_id": request.tenant_id, "owner_id": request.owner_id}
        if request.kind != SAMPLE:
            self._futures.add(request.request_id, **add, tokens=0)
            model = self._sessions.any_model(request.owner_id)
            if model is not None and model.order.is_late(request.seq_id):
                await self._reopen_save(model, request, versions)
            return
        row = await self._store.read(find_request_by_id, request.request_id)
        assert row is not None and row.state == WAITING and row.body is not None
        work = unpack_stored(row.body, SampleWork)
        self._futures.add(request.request_id, **add, tokens=len(work.prompt_ids))
        self._samples.begin(request.request_id, request.tenant_id, work)

    async def _reopen_save(self, model: LiveModel, request: RequestRow, versions: Mapping[int, VersionRow]) -> None:
        """Publish a version again that was exported before the restart."""
        row = await self._store.read(find_journal_row, model.model_id, request.seq_id)
        made = [version for version in versions.values() if version.request_id == request.request_id]
        assert row is not None and made, "both are committed together with the model's progress"
        self._saves.begin(model, request.request_id, request.seq_id, unpack_stored(row.body, SaveWork), made)

    async def _hold_saved(self, versions: Mapping[int, VersionRow]) -> None:
        """Mark versions of saved weights as in use, and withdraw versions that nothing uses."""
        saved = await self._store.read(read_saved_versions, list(versions))
        for policy_version, path in saved.items():
            self._adapters.hold(policy_version, path)
        for policy_version in versions:
            if not self._adapters.is_held(policy_version):
                self._adapters.drop(policy_version)

    def _delete_unknown(self, versions: Mapping[int, VersionRow], directories: Collection[str]) -> None:
        """Delete adapters and weights that were not committed before the hub was killed."""
        known = {version_directory(self._root, policy_version) for policy_version in versions}
        known |= {self._root / directory for directory in directories}
        for folder in (version_directory(self._root, 0).parent, self._root / WEIGHTS_FOLDER):
            for path in folder.iterdir() if folder.is_dir() else ():
                if path not in known:
                    _delete(path)


def _model(row: ModelRow) -> LiveModel:
    return LiveModel(
        model_id=row.model_id,
        tenant_id=row.tenant_id,
        session_id=row.session_id,
        base_model=row.base_model,
        lora=LoraWish(**row.lora),
        user_metadata=dict(row.user_metadata),
        order=ModelOrder(row.next_seq),
        gradient=GradientState(row.covered_seq),
        steps=row.steps,
        covered_seq=row.covered_seq,
        directory=row.directory,
        last_request_at=row.last_request_at,
    )


def _delete(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        log.warning("The unfinished adapter %s cannot be deleted: %s", path, error)
