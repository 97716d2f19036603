"""A run's tenants, and the store's queries as the hub makes them for tenants."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from echo_hub.store.store import Store
from echo_hub.store.tenant_overview import read_failed_requests, read_tenant_limits, read_tenants
from echo_hub.store.tenant_reading import (
    drop_tenant_outcomes,
    find_checkpoint,
    find_journal_row,
    find_model,
    find_request,
    find_request_by_id,
    find_tenant_session,
    forget_tenant_sessions,
    is_sampler_known,
    read_checkpoint_bytes,
    read_checkpoint_directories,
    read_checkpoints,
    read_ended_requests,
    read_expired_checkpoints,
    read_journal_marks,
    read_live_tenants,
    read_live_versions,
    read_models,
    read_newest_end,
    read_newest_tenant_version,
    read_requests_from,
    read_result_bytes,
    read_saved_versions,
    read_tokens_of_day,
    read_waiting_requests,
)
from echo_hub.store.tenant_records import (
    DONE,
    CheckpointKept,
    CheckpointRemoved,
    CheckpointRow,
    JournalDropped,
    JournalReplaced,
    JournalRow,
    ModelCovered,
    ModelMoved,
    ModelRow,
    RequestEnded,
    RequestRead,
    RequestRow,
    SamplerRow,
    SessionRow,
    TenantRecord,
    TenantSamplerEnded,
    TenantSessionEnded,
    TenantTallied,
    VersionRow,
    VersionWithdrawn,
    write_tenant_records,
)

LIVE = 2
"""Number of newest sessions that are still open; all earlier ones have ended."""


def of_session(number: int) -> list[TenantRecord]:
    """Return the rows of one tenant with one session: a model, a sampler, a request of each, saved weights."""
    session_id, tenant_id, at = f"s{number}", f"t{number}", float(number)
    model_id, sampler_id = f"{session_id}:train:0", f"{session_id}:sample:0"
    version = 2**30 + number
    ids = {"tenant_id": tenant_id, "session_id": session_id}
    return [
        SessionRow(**ids, about={}, made_at=at),
        ModelRow(
            **ids,
            model_id=model_id,
            base_model="b",
            lora={},
            user_metadata={},
            made_at=at,
            last_request_at=at,
            next_seq=1,
        ),
        SamplerRow(
            **ids,
            sampler_id=sampler_id,
            base_model="b",
            path="",
            model_id=model_id,
            policy_version=version,
            inflight=False,
            made_at=at,
        ),
        RequestRow(**ids, request_id=f"a{number}", owner_id=model_id, seq_id=1, kind="pass", made_at=at),
        RequestRow(**ids, request_id=f"b{number}", owner_id=sampler_id, seq_id=1, kind="sample", made_at=at, body=b"b"),
        RequestEnded(request_id=f"b{number}", state=DONE, outcome=b"o", ended_at=at, end_number=number),
        JournalRow(model_id=model_id, seq_id=1, kind="pass", body=b"b"),
        CheckpointRow(
            path=f"tinker://{model_id}/weights/a",
            tenant_id=tenant_id,
            model_id=model_id,
            kind="weights",
            made_at=at,
            size_bytes=9,
            directory="d",
            policy_version=version,
            expires_at=1e9,
        ),
        VersionRow(
            policy_version=version, tenant_id=tenant_id, model_id=model_id, step=1, request_id=f"a{number}", made_at=at
        ),
        TenantTallied(tenant_id=tenant_id, day=number, requests=1, prompt_tokens=2, drawn_tokens=3),
    ]


def fill_tenants(store: Store, steps: int) -> None:
    for number in range(1, steps + 1):
        store.write(write_tenant_records, of_session(number))
        if number <= steps - LIVE:
            ended = TenantSessionEnded(session_id=f"s{number}", ended_at=float(number))
            withdrawn = VersionWithdrawn(policy_version=2**30 + number, withdrawn_at=float(number))
            store.write(write_tenant_records, [ended, withdrawn])
    store.write(drop_tenant_outcomes, read_before=0.0, ended_before=float(steps - LIVE))


def tenant_calls(store: Store, steps: int) -> Mapping[str, Callable[[], object]]:
    session_id, tenant_id = f"s{steps}", f"t{steps}"
    model_id, sampler_id = f"{session_id}:train:0", f"{session_id}:sample:0"
    path = f"tinker://{model_id}/weights/a"
    return {
        "write_tenant_records": lambda: store.write(write_tenant_records, all_records(steps)),
        "read_live_tenants": lambda: store.read(read_live_tenants),
        "read_waiting_requests": lambda: store.read(read_waiting_requests),
        "read_newest_end": lambda: store.read(read_newest_end),
        "find_tenant_session": lambda: store.read(find_tenant_session, session_id),
        "is_sampler_known": lambda: store.read(is_sampler_known, sampler_id),
        "find_request_by_id": lambda: store.read(find_request_by_id, f"a{steps}"),
        "find_request": lambda: store.read(find_request, model_id, 1),
        "read_requests_from": lambda: store.read(read_requests_from, model_id, 1),
        "read_ended_requests": lambda: store.read(
            read_ended_requests, sampler_id, after=0, seq_ids=range(10**9), limit=10
        ),
        "find_journal_row": lambda: store.read(find_journal_row, model_id, 1),
        "read_journal_marks": lambda: store.read(read_journal_marks, model_id),
        "find_model": lambda: store.read(find_model, model_id),
        "read_models": lambda: store.read(read_models, tenant_id),
        "find_checkpoint": lambda: store.read(find_checkpoint, path),
        "read_checkpoints": lambda: (
            store.read(read_checkpoints, tenant_id, None),
            store.read(read_checkpoints, tenant_id, model_id),
        ),
        "read_checkpoint_directories": lambda: store.read(read_checkpoint_directories),
        "read_checkpoint_bytes": lambda: store.read(read_checkpoint_bytes, tenant_id),
        "read_expired_checkpoints": lambda: store.read(read_expired_checkpoints, 2.0),
        "read_live_versions": lambda: store.read(read_live_versions),
        "read_saved_versions": lambda: store.read(read_saved_versions, [2**30 + steps]),
        "read_newest_tenant_version": lambda: store.read(read_newest_tenant_version),
        "read_tokens_of_day": lambda: store.read(read_tokens_of_day, steps),
        "read_result_bytes": lambda: store.read(read_result_bytes, after=0.0),
        "read_tenant_limits": lambda: store.read(read_tenant_limits),
        "read_tenants": lambda: store.read(read_tenants, day=steps, now=2.0, tokens_per_day=0),
        "read_failed_requests": lambda: store.read(read_failed_requests, since=1.0, limit=3),
        "drop_tenant_outcomes": lambda: store.write(drop_tenant_outcomes, read_before=1.0, ended_before=1.0),
        "forget_tenant_sessions": lambda: store.write(forget_tenant_sessions, 4.0),
    }


def all_records(steps: int) -> list[TenantRecord]:
    """Return new rows for all tables of tenants, and one record of each kind that changes such rows."""
    new = steps + 1_000
    rows = of_session(new)
    model_id = f"s{new}:train:0"
    path = f"tinker://{model_id}/weights/a"
    return [
        *rows,
        RequestEnded(request_id=f"a{new}", state=DONE, outcome=b"o", ended_at=1.0, end_number=new),
        RequestRead(request_id=f"a{new}", read_at=1.0),
        JournalReplaced(model_id=model_id, seq_id=1, kind="spoiled"),
        JournalDropped(model_id=model_id, seq_id=1),
        ModelMoved(model_id=model_id, next_seq=2, steps=1, last_request_at=1.0),
        ModelCovered(model_id=model_id, covered_seq=1, directory="d"),
        CheckpointKept(path=path, expires_at=None),
        CheckpointRemoved(path=path, directory="d"),
        VersionWithdrawn(policy_version=2**30 + new, withdrawn_at=1.0),
        TenantTallied(tenant_id=f"t{new}", day=new, requests=1),
        TenantSamplerEnded(sampler_id=f"s{new}:sample:0", ended_at=1.0),
        TenantSessionEnded(session_id=f"s{new}", ended_at=1.0),
    ]
