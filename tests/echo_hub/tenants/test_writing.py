from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from echo_hub.store.async_store import AsyncStore
from echo_hub.store.store import Store
from echo_hub.store.tenant_reading import find_request_by_id, find_tenant_session, read_ended_requests
from echo_hub.store.tenant_records import DONE, RequestRead, RequestRow, SessionRow
from echo_hub.tenants.writing import TenantWriter
from echo_shared.errors import StorageError


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[AsyncStore]:
    opened = AsyncStore(Store.open(f"sqlite:///{tmp_path / 'echo.db'}"))
    yield opened
    await opened.close()


def session(number: int) -> SessionRow:
    return SessionRow(session_id=f"s-{number}", tenant_id="ada", about={}, made_at=1.0)


def request(number: int) -> RequestRow:
    ids = {"request_id": f"r-{number}", "tenant_id": "ada", "session_id": "s-1", "owner_id": "s-1:sample:0"}
    return RequestRow(**ids, seq_id=number, kind="sample", made_at=1.0, body=b"b")


async def test_calls_that_wait_share_a_transaction(store: AsyncStore, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = []
    write = store.store.write
    monkeypatch.setattr(store.store, "write", lambda *args, **kwargs: (writes.append(args), write(*args, **kwargs))[1])
    writer = TenantWriter(store)
    await asyncio.gather(*(writer.commit(session(number)) for number in range(50)))
    assert len(writes) <= 2
    found = [await store.read(find_tenant_session, f"s-{number}") for number in range(50)]
    assert all(found)


async def test_ends_are_numbered_in_the_order_of_their_commits(store: AsyncStore) -> None:
    writer = TenantWriter(store)
    await writer.open()
    await writer.commit(*map(request, range(20)))
    order = [7, 3, 19, 0, 5]
    await asyncio.gather(
        *(writer.commit_end(f"r-{number}", state=DONE, outcome=b"o", ended_at=2.0) for number in order)
    )
    again = TenantWriter(store)
    await again.open()
    await again.commit_end("r-1", state=DONE, outcome=b"o", ended_at=3.0)
    found = await store.read(read_ended_requests, "s-1:sample:0", after=0, seq_ids=range(100), limit=100)
    assert [(each[0], each[2]) for each in found] == [(f"r-{n}", i) for i, n in enumerate([*order, 1], 1)]
    row = await store.read(find_request_by_id, "r-7")
    assert row is not None and (row.state, row.body, row.outcome) == (DONE, None, b"o")


async def test_later_records_go_with_the_next_commit(store: AsyncStore) -> None:
    writer = TenantWriter(store)
    await writer.commit(request(1))
    writer.later(RequestRead(request_id="r-1", read_at=5.0))
    await writer.commit(session(2))
    row = await store.read(find_request_by_id, "r-1")
    assert row is not None and row.read_at == 5.0


async def test_a_failed_call_fails_alone_and_not_its_batch(store: AsyncStore) -> None:
    writer = TenantWriter(store)
    await writer.commit(session(1), request(1))
    writer.later(RequestRead(request_id="r-1", read_at=5.0))
    results = await asyncio.gather(
        *(writer.commit(session(number)) for number in (2, 1, 3)), writer.commit(session(4)), return_exceptions=True
    )
    assert [type(result) for result in results] == [type(None), StorageError, type(None), type(None)]
    await writer.commit(session(5))
    assert all([await store.read(find_tenant_session, f"s-{number}") for number in (2, 3, 4, 5)])
    row = await store.read(find_request_by_id, "r-1")
    assert row is not None and row.read_at == 5.0


async def test_a_record_that_no_call_waits_for_is_not_lost_without_a_word(
    store: AsyncStore, caplog: pytest.LogCaptureFixture
) -> None:
    writer = TenantWriter(store)
    await writer.commit(session(1))
    writer.later(session(1))
    await writer.commit(session(2))
    await writer.close()
    assert "1 records of tenants, which no call waits for, could not be written" in caplog.text
    assert await store.read(find_tenant_session, "s-2") is not None


async def test_a_cancelled_call_is_written_all_the_same(store: AsyncStore) -> None:
    writer = TenantWriter(store)
    call = asyncio.create_task(writer.commit(session(1)))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await writer.close()
    assert await store.read(find_tenant_session, "s-1") is not None
