"""Queries of tenants' rows, and deletion of the rows of ended sessions, on SQLite and PostgreSQL."""

from __future__ import annotations

import pytest

from echo_hub.store import tenant_reading
from echo_hub.store.store import Store
from echo_hub.store.tenant_reading import (
    drop_tenant_outcomes,
    find_checkpoint,
    find_journal_row,
    find_model,
    find_request,
    find_request_by_id,
    find_tenant_session,
    forget_tenant_sessions,
    read_checkpoints,
    read_ended_requests,
    read_journal_marks,
    read_live_tenants,
    read_result_bytes,
    read_saved_versions,
    read_tokens_of_day,
    read_waiting_requests,
)
from echo_hub.store.tenant_records import (
    DONE,
    FAILED,
    CheckpointRemoved,
    ModelCovered,
    RequestEnded,
    RequestRead,
    RequestRow,
    TenantSamplerEnded,
    TenantSessionEnded,
    TenantTallied,
    write_tenant_records,
)
from tests.echo_hub.store.tenant_calls import of_session


def test_rows_come_back_as_they_were_written(store: Store) -> None:
    rows = of_session(1)
    store.write(write_tenant_records, rows)
    assert store.read(find_tenant_session, "s1") == rows[0]
    assert store.read(find_model, "s1:train:0") == rows[1]
    live = store.read(read_live_tenants)
    assert (*live.sessions, *live.models, *live.samplers) == tuple(rows[:3])
    assert store.read(find_request, "s1:train:0", 1) == rows[3]
    assert store.read(find_journal_row, "s1:train:0", 1) == rows[6]
    found = store.read(find_checkpoint, "tinker://s1:train:0/weights/a")
    assert found is not None and (found.path, found.expires_at, list(found.recipients)) == (rows[7].path, 1e9, [])  # type: ignore[union-attr]
    assert store.read(read_saved_versions, [2**30 + 1, 2**30 + 2]) == {2**30 + 1: found.path}
    assert [row.request_id for row in store.read(read_waiting_requests)] == ["a1"]


def test_ends_are_listed_by_number_and_clone(store: Store) -> None:
    store.write(write_tenant_records, of_session(1))
    ids = {"tenant_id": "t1", "session_id": "s1", "owner_id": "s1:sample:0", "kind": "sample", "made_at": 1.0}
    for number, seq_id in enumerate((2, 10**9, 3), 2):
        row = RequestRow(**ids, request_id=f"c{number}", seq_id=seq_id)
        end = RequestEnded(
            request_id=row.request_id, state=FAILED, outcome=b"", ended_at=float(number), end_number=number
        )
        store.write(write_tenant_records, [row, end])
    query = {"seq_ids": range(10**9), "limit": 10}
    assert store.read(read_ended_requests, "s1:sample:0", after=0, **query) == [
        ("b1", False, 1),
        ("c2", True, 2),
        ("c4", True, 4),
    ]
    assert store.read(read_ended_requests, "s1:sample:0", after=2, **query) == [("c4", True, 4)]


def test_outcomes_are_dropped_by_when_they_were_read_and_ended(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2, 3):
        store.write(write_tenant_records, of_session(number))
    store.write(write_tenant_records, [RequestRead(request_id="b3", read_at=10.0)])
    store.write(write_tenant_records, [RequestRead(request_id="b3", read_at=99.0)])
    assert store.read(read_result_bytes, after=0.0) == ({"t1": 1, "t2": 1, "t3": 1}, None)
    monkeypatch.setattr(tenant_reading, "COUNTED_AT_ONCE", 2)
    part, after = store.read(read_result_bytes, after=0.0)
    assert part == {"t1": 1, "t2": 1} and after is not None
    assert store.read(read_result_bytes, after=after) == ({"t3": 1}, None)
    assert store.write(drop_tenant_outcomes, read_before=11.0, ended_before=1.5) == 2
    assert store.read(read_result_bytes, after=0.0) == ({"t2": 1}, None)
    rows = [store.read(find_request_by_id, f"b{number}") for number in (1, 2, 3)]
    assert [row is not None and row.outcome for row in rows] == [None, b"o", None]
    assert all(row is not None and row.state == DONE for row in rows)


def test_an_ended_session_leaves_only_its_weights(store: Store) -> None:
    store.write(write_tenant_records, of_session(1))
    store.write(write_tenant_records, of_session(2))
    store.write(write_tenant_records, [TenantSessionEnded(session_id="s1", ended_at=5.0)])
    row = store.read(find_request_by_id, "a1")
    assert row is not None and (row.state, row.ended_at) == (FAILED, 5.0)
    assert store.read(read_journal_marks, "s1:train:0") == []
    assert [session.session_id for session in store.read(read_live_tenants).sessions] == ["s2"]
    assert store.write(forget_tenant_sessions, 5.0) == 0
    assert store.write(forget_tenant_sessions, 6.0) == 1
    assert store.read(find_tenant_session, "s1") is None and store.read(find_request_by_id, "a1") is None
    assert store.read(find_model, "s1:train:0") is not None, "its weights are saved"
    assert len(store.read(read_checkpoints, "t1", "s1:train:0")) == 1
    path = "tinker://s1:train:0/weights/a"
    store.write(write_tenant_records, [CheckpointRemoved(path=path, directory="overwritten meanwhile")])
    (there,) = store.read(read_checkpoints, "t1", None)
    store.write(write_tenant_records, [CheckpointRemoved(path=path, directory=there.directory)])
    assert store.read(read_checkpoints, "t1", None) == []


def test_a_checkpoint_takes_the_journal_behind_it(store: Store) -> None:
    store.write(write_tenant_records, of_session(1))
    covered = ModelCovered(model_id="s1:train:0", covered_seq=1, directory="d")
    store.write(write_tenant_records, [covered, TenantSamplerEnded(sampler_id="s1:sample:0", ended_at=2.0)])
    assert store.read(find_journal_row, "s1:train:0", 1) is None
    model = store.read(find_model, "s1:train:0")
    assert model is not None and (model.covered_seq, model.directory) == (1, "d")
    assert [sampler.ended_at for sampler in store.read(read_live_tenants).samplers] == [2.0]


def test_totals_of_a_day_add_up(store: Store) -> None:
    for tokens in (1, 10):
        store.write(write_tenant_records, [TenantTallied(tenant_id="ada", day=7, trained_tokens=tokens)])
    store.write(write_tenant_records, [TenantTallied(tenant_id="ada", day=8, prompt_tokens=5)])
    assert store.read(read_tokens_of_day, 7) == {"ada": 11}


@pytest.mark.parametrize("given", ["s1\x00", "\ud800", "s1\n", "ü"])
def test_texts_that_are_no_ids_find_nothing(store: Store, given: str) -> None:
    assert store.read(find_tenant_session, given) is None
    assert store.read(find_request_by_id, given) is None
    assert store.read(find_model, given) is None
    assert store.read(find_checkpoint, given) is None
    assert store.read(read_checkpoints, "ada", given) == []


def test_saved_versions_are_found_among_any_number(store: Store) -> None:
    """At its start, the hub asks for the versions of all tenants, which may be more than a query's parameters."""
    store.write(write_tenant_records, of_session(1))
    (there,) = store.read(read_checkpoints, "t1", None)
    many = [*range(2 * there.policy_version, 2 * there.policy_version + 300_000), there.policy_version]
    assert store.read(read_saved_versions, many) == {there.policy_version: there.path}
