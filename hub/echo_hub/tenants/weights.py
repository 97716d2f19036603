"""Saved weights of tenants' models: on disk below RUN/tenants/weights, with a database row for each path.

A save commits the path's row after writing all files. A deletion removes the row first.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from echo_hub.store.tenant_reading import (
    find_checkpoint,
    find_model,
    is_sampler_known,
    read_checkpoint_bytes,
    read_checkpoints,
    read_expired_checkpoints,
)
from echo_hub.store.tenant_records import (
    CheckpointKept,
    CheckpointRemoved,
    CheckpointRow,
    ModelRow,
    TenantRecord,
    VersionRow,
)
from echo_hub.tenants.computing import ModelComputer
from echo_hub.tenants.core import TenantCore
from echo_hub.tenants.outcomes import ModelInfo, TenantCheckpoint
from echo_hub.tenants.paths import WeightsPath
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import LoraWish, WeightsKind
from echo_hub.tenants.sessions import LiveModel
from echo_hub.tenants.stored import SaveWork
from echo_hub.tenants.versions import version_directory

log = logging.getLogger(__name__)

WEIGHTS_FOLDER: Final = "tenants/weights"


class Weights:
    """Saves, lists and deletes weights. All methods that take a tenant raise Refusal for paths of other tenants."""

    def __init__(self, core: TenantCore) -> None:
        self._root = core.directory.root
        self._store = core.store
        self._writer = core.writer
        self._adapters = core.adapters
        self._sessions = core.sessions
        self._quotas = core.quotas

    async def save(self, model: LiveModel, work: SaveWork, computer: ModelComputer) -> CheckpointRow:
        """Write a model's weights into a new directory, and return the row to commit."""
        relative = f"{WEIGHTS_FOLDER}/{secrets.token_hex(8)}"
        path = self._root / relative
        if work.weights is WeightsKind.TRAINING:
            await computer.save(model.model_id, path)
        else:
            await computer.export(model.model_id, path)
        return await asyncio.to_thread(self._row, model, work, relative)

    async def export(self, model: LiveModel, request_id: str, computer: ModelComputer) -> VersionRow:
        """Write a new version for samplers, and return the row to commit."""
        version = self._adapters.new_version()
        await computer.export(model.model_id, version_directory(self._root, version))
        return VersionRow(
            policy_version=version,
            tenant_id=model.tenant_id,
            model_id=model.model_id,
            step=model.steps,
            request_id=request_id,
            made_at=time.time(),
        )

    async def row_of_version(self, model: LiveModel, work: SaveWork, version: int) -> CheckpointRow:
        directory = version_directory(self._root, version).relative_to(self._root).as_posix()
        return await asyncio.to_thread(self._row, model, work, directory, version)

    async def check_bytes(self, tenant_id: str) -> None:
        """Raise Refusal if the tenant's saved weights take too much disk space."""
        self._quotas.check_bytes(tenant_id, await self._store.read(read_checkpoint_bytes, tenant_id))

    async def check_free(self, work: SaveWork) -> CheckpointRow | None:
        """Check that the save may use its path. Return the checkpoint that it replaces, if any. Raises Refusal if the
        path exists and `overwrite` is false."""
        there = await self._store.read(find_checkpoint, work.path) if work.path else None
        if there is not None and not work.overwrite:
            raise Refusal(
                RefusalKind.INVALID,
                "There are weights under this path already.",
                got=work.path,
                do="Choose another name, set overwrite, or delete these weights.",
                param="path",
            )
        return there

    async def check_new_sampler(self, sampler_id: str) -> None:
        """Raise Refusal if a sampler with this id exists or existed."""
        if await self._store.read(is_sampler_known, sampler_id):
            raise Refusal(
                RefusalKind.INVALID,
                "The number of this sampler is used up.",
                got=sampler_id,
                do="Use the next sampling_session_seq_id for each new sampler.",
                param="sampling_session_seq_id",
            )

    def replacing(self, row: CheckpointRow, replaced: CheckpointRow | None) -> list[TenantRecord]:
        """Return the records that put `row` under its path. After their commit, call `remove_files` for
        the checkpoint that they replace."""
        return [row] if replaced is None else [_removed(replaced), row]

    async def find(self, tenant_id: str, path: str) -> CheckpointRow:
        row = await self._store.read(find_checkpoint, str(WeightsPath.parse(path)))
        if row is None or row.tenant_id != tenant_id or (row.expires_at is not None and row.expires_at <= time.time()):
            raise Refusal(
                RefusalKind.NOT_FOUND,
                "There are no weights under this path.",
                got=path,
                do="Check the path. Weights may have been deleted, or their time to live is over.",
                param="path",
            )
        return row

    async def find_for_training(self, tenant_id: str, path: str) -> tuple[CheckpointRow, ModelRow]:
        """Return a checkpoint that has optimizer state, and its model's row."""
        row = await self.find(tenant_id, path)
        if row.kind != WeightsKind.TRAINING:
            raise Refusal(
                RefusalKind.INVALID,
                "Training cannot continue from these weights: they have no optimizer.",
                got=path,
                do="Load a path with the kind `weights`, which save_weights returns.",
                param="path",
            )
        model = await self._store.read(find_model, row.model_id)
        assert model is not None, "models with checkpoints are kept"
        return row, model

    def directory(self, row: CheckpointRow) -> Path:
        return self._root / row.directory

    async def list(self, tenant_id: str, model_id: str | None) -> tuple[TenantCheckpoint, ...]:
        rows = await self._store.read(read_checkpoints, tenant_id, model_id)
        infos: dict[str, ModelInfo] = {}
        for row in rows:
            if row.model_id not in infos:
                infos[row.model_id] = await self._info(row)
        now = time.time()
        live = (row for row in rows if row.expires_at is None or row.expires_at > now)
        return tuple(_checkpoint(row, infos[row.model_id]) for row in live)

    async def describe(self, tenant_id: str, path: str) -> TenantCheckpoint:
        row = await self.find(tenant_id, path)
        return _checkpoint(row, await self._info(row))

    async def files(self, tenant_id: str, path: str) -> Mapping[str, Path]:
        row = await self.find(tenant_id, path)
        if row.kind != WeightsKind.EXTERNAL:
            raise Refusal(
                RefusalKind.INVALID,
                "Only external weights can be downloaded.",
                got=path,
                do="Save them with save_weights_external first.",
                param="path",
            )
        directory = self.directory(row)
        return await asyncio.to_thread(lambda: {each.name: each for each in sorted(directory.iterdir())})

    async def set_ttl(self, tenant_id: str, path: str, ttl_s: float | None) -> None:
        row = await self.find(tenant_id, path)
        await self._writer.commit(
            CheckpointKept(path=row.path, expires_at=None if ttl_s is None else time.time() + ttl_s)
        )

    async def delete(self, tenant_id: str, path: str) -> None:
        await self.remove(await self.find(tenant_id, path))

    async def remove_expired(self) -> None:
        for row in await self._store.read(read_expired_checkpoints, time.time()):
            await self.remove(row)

    async def remove(self, row: CheckpointRow) -> None:
        removed = _removed(row)
        await self._writer.commit(removed)
        await self.remove_files(removed)

    async def remove_files(self, removed: CheckpointRemoved) -> None:
        """Delete the files of a checkpoint whose row is gone. A version stays while samplers draw with it."""
        if removed.policy_version:
            self._adapters.release(removed.policy_version, removed.path)
            return
        try:
            await asyncio.to_thread(shutil.rmtree, self._root / removed.directory)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("The weights in %s cannot be deleted: %s", removed.directory, error)

    def _row(self, model: LiveModel, work: SaveWork, relative: str, version: int = 0) -> CheckpointRow:
        now = time.time()
        return CheckpointRow(
            path=work.path,
            tenant_id=model.tenant_id,
            model_id=model.model_id,
            kind=work.weights,
            made_at=now,
            size_bytes=sum(each.stat().st_size for each in (self._root / relative).rglob("*") if each.is_file()),
            directory=relative,
            policy_version=version,
            steps=model.steps,
            expires_at=None if work.ttl_s is None else now + work.ttl_s,
            recipients=work.recipients,
            user_metadata=work.user_metadata or {},
        )

    async def _info(self, row: CheckpointRow) -> ModelInfo:
        live = self._sessions.any_model(row.model_id)
        if live is not None:
            return live.info
        model = await self._store.read(find_model, row.model_id)
        assert model is not None, "models with checkpoints are kept"
        return info_of(model)


def _removed(row: CheckpointRow) -> CheckpointRemoved:
    return CheckpointRemoved(path=row.path, directory=row.directory, policy_version=row.policy_version)


def info_of(row: ModelRow) -> ModelInfo:
    lora = LoraWish(**row.lora)
    return ModelInfo(
        model_id=row.model_id,
        session_id=row.session_id,
        base_model=row.base_model,
        rank=lora.rank,
        attention=lora.attention,
        mlp=lora.mlp,
        steps=row.steps,
        user_metadata=row.user_metadata,
        last_request_at=row.last_request_at,
    )


def _checkpoint(row: CheckpointRow, model: ModelInfo) -> TenantCheckpoint:
    return TenantCheckpoint(
        path=row.path,
        kind=WeightsKind(row.kind),
        made_at=row.made_at,
        size_bytes=row.size_bytes,
        expires_at=row.expires_at,
        model=model,
        recipients=tuple(row.recipients),
        user_metadata=row.user_metadata,
    )
