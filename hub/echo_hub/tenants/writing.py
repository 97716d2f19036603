"""Commit tenants' records, many in one transaction, because thousands of requests may come within a second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from echo_hub.store.async_store import AsyncStore
from echo_hub.store.tenant_reading import read_newest_end
from echo_hub.store.tenant_records import RequestEnded, TenantRecord, write_tenant_records

log = logging.getLogger(__name__)


class TenantWriter:
    """Writes records in the order of the calls. Waiting calls share the next transaction."""

    def __init__(self, store: AsyncStore) -> None:
        self._store = store
        self._waiting: list[tuple[Sequence[TenantRecord], asyncio.Future[None]]] = []
        self._work: asyncio.Task[None] | None = None
        self._ends = 0
        self._later: list[TenantRecord] = []

    async def open(self) -> None:
        self._ends = await self._store.read(read_newest_end)

    async def commit(self, *records: TenantRecord) -> None:
        """Return when the records are on disk. Cancelling does not stop the write. Raises StorageError."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((records, done))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._write(), name="tenant-writer")
        await asyncio.shield(done)

    def later(self, record: TenantRecord) -> None:
        """Write a record together with the next commit. If the hub is killed before that, the record is lost."""
        self._later.append(record)

    async def flush(self) -> None:
        """Write the records that `later` has collected."""
        if self._later:
            await self.commit()

    async def commit_end(
        self, request_id: str, *, state: str, outcome: bytes | None, ended_at: float, more: Sequence[TenantRecord] = ()
    ) -> None:
        """Commit the end of a request together with further records. The request gets the next number in the order of
        ends."""
        self._ends += 1
        ended = RequestEnded(
            request_id=request_id, state=state, outcome=outcome, ended_at=ended_at, end_number=self._ends
        )
        await self.commit(ended, *more)

    async def close(self) -> None:
        """Write all waiting records."""
        await self.flush()
        if self._work is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(self._work)

    async def _write(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            later, by_nobody = self._later, asyncio.get_running_loop().create_future()
            if later:
                batch.append((later, by_nobody))
                self._later = []
            try:
                await self._write_calls(batch)
            except BaseException:
                for _, done in batch:
                    if not done.done():
                        done.set_exception(RuntimeError("stopped"))
                raise
            if later and (error := by_nobody.exception()) is not None:
                log.error("%d records of tenants, which no call waits for, could not be written: %s", len(later), error)

    async def _write_calls(self, calls: Sequence[tuple[Sequence[TenantRecord], asyncio.Future[None]]]) -> None:
        """Write the records of the calls in one transaction. If it fails, write each call alone: records of one tenant
        that the database refuses must not fail the calls of others."""
        try:
            await self._store.write(write_tenant_records, [record for of_call, _ in calls for record in of_call])
        except Exception as error:  # noqa: BLE001 - `commit` raises it.
            if len(calls) == 1:
                calls[0][1].set_exception(error)
                return
            for call in calls:
                await self._write_calls([call])
        else:
            for _, done in calls:
                done.set_result(None)
