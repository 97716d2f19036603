"""Read rows of tenants, and delete rows of ended sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Select, delete, exists, func, select, update

from echo_hub.store.bulk import among
from echo_hub.store.tenant_records import (
    FAILED,
    WAITING,
    CheckpointRow,
    JournalRow,
    ModelRow,
    RequestRow,
    SamplerRow,
    SessionRow,
    VersionRow,
)
from echo_hub.store.tenant_tables import (
    tenant_checkpoints,
    tenant_journal,
    tenant_models,
    tenant_requests,
    tenant_samplers,
    tenant_sessions,
    tenant_tallies,
    tenant_versions,
)

AT_ONCE: Final = 4
"""Largest number of sessions that one call of `forget_tenant_sessions` deletes."""
COUNTED_AT_ONCE: Final = 5_000
"""Largest number of outcomes that one call of `read_result_bytes` counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTenants:
    """The sessions that have not ended, with their models and samplers."""

    sessions: Sequence[SessionRow]
    models: Sequence[ModelRow]
    samplers: Sequence[SamplerRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMark:
    """A request as listed, without its body and outcome."""

    request_id: str
    seq_id: int
    kind: str
    state: str


def read_live_tenants(connection: Connection) -> LiveTenants:
    live = select(tenant_sessions.c.session_id).where(tenant_sessions.c.ended_at.is_(None))
    sessions = connection.execute(select(tenant_sessions).where(tenant_sessions.c.ended_at.is_(None)))
    models = connection.execute(select(tenant_models).where(tenant_models.c.session_id.in_(live)))
    samplers = connection.execute(select(tenant_samplers).where(tenant_samplers.c.session_id.in_(live)))
    return LiveTenants(
        sessions=[SessionRow(**row) for row in sessions.mappings()],
        models=[ModelRow(**row) for row in models.mappings()],
        samplers=[SamplerRow(**row) for row in samplers.mappings()],
    )


def read_waiting_requests(connection: Connection) -> list[RequestRow]:
    """Return all unfinished requests without their bodies."""
    columns = [column for column in tenant_requests.c if column.name not in ("body", "outcome")]
    waiting = select(*columns).where(tenant_requests.c.state == WAITING).order_by(tenant_requests.c.made_at)
    return [RequestRow(**row) for row in connection.execute(waiting).mappings()]


def read_newest_end(connection: Connection) -> int:
    """Return the number of the request that ended last (requests are numbered as they end); 0 if none has ended."""
    return connection.scalar(select(func.max(tenant_requests.c.end_number))) or 0


def _is_id(given: str) -> bool:
    """Return False for a text that cannot be an id. A database may refuse such a text, for example one with NUL
    characters.
    """
    return given.isascii() and given.isprintable()


def find_tenant_session(connection: Connection, session_id: str) -> SessionRow | None:
    if not _is_id(session_id):
        return None
    of_it = select(tenant_sessions).where(tenant_sessions.c.session_id == session_id)
    row = connection.execute(of_it).mappings().first()
    return None if row is None else SessionRow(**row)


def is_sampler_known(connection: Connection, sampler_id: str) -> bool:
    """Return True if a sampler with this id exists or existed."""
    column = tenant_samplers.c.sampler_id
    return connection.scalar(select(column).where(column == sampler_id)) is not None


def find_request_by_id(connection: Connection, request_id: str) -> RequestRow | None:
    if not _is_id(request_id):
        return None
    return _request(connection, select(tenant_requests).where(tenant_requests.c.request_id == request_id))


def find_request(connection: Connection, owner_id: str, seq_id: int) -> RequestRow | None:
    of_it = (tenant_requests.c.owner_id == owner_id, tenant_requests.c.seq_id == seq_id)
    return _request(connection, select(tenant_requests).where(*of_it))


def _request(connection: Connection, query: Select[tuple[object, ...]]) -> RequestRow | None:
    row = connection.execute(query).mappings().first()
    return None if row is None else RequestRow(**row)


def read_requests_from(connection: Connection, owner_id: str, seq_id: int) -> list[RequestMark]:
    """Return a model's requests with `seq_id` or a higher number, in order."""
    columns = (tenant_requests.c[name] for name in ("request_id", "seq_id", "kind", "state"))
    of_it = (tenant_requests.c.owner_id == owner_id, tenant_requests.c.seq_id >= seq_id)
    rows = connection.execute(select(*columns).where(*of_it).order_by(tenant_requests.c.seq_id))
    return [RequestMark(**row) for row in rows.mappings()]


def read_ended_requests(
    connection: Connection, owner_id: str, *, after: int, seq_ids: range, limit: int
) -> list[tuple[str, bool, int]]:
    """Return (request id, True if it failed, end number) of requests that ended after number `after`. Requests are
    numbered as they end.
    """
    of_it = (
        tenant_requests.c.owner_id == owner_id,
        tenant_requests.c.end_number > after,
        tenant_requests.c.seq_id.between(seq_ids.start, seq_ids.stop - 1),
    )
    columns = (tenant_requests.c.request_id, tenant_requests.c.state, tenant_requests.c.end_number)
    query = select(*columns).where(*of_it).order_by(tenant_requests.c.end_number).limit(limit)
    return [(row.request_id, row.state == FAILED, row.end_number) for row in connection.execute(query)]


def find_journal_row(connection: Connection, model_id: str, seq_id: int) -> JournalRow | None:
    of_it = (tenant_journal.c.model_id == model_id, tenant_journal.c.seq_id == seq_id)
    row = connection.execute(select(tenant_journal).where(*of_it)).mappings().first()
    return None if row is None else JournalRow(**row)


def read_journal_marks(connection: Connection, model_id: str) -> list[tuple[int, str, int]]:
    """Return (seq_id, kind, bytes of the body) of a model's journal, in the order of seq_id."""
    columns = (tenant_journal.c.seq_id, tenant_journal.c.kind, func.length(tenant_journal.c.body).label("size"))
    of_it = select(*columns).where(tenant_journal.c.model_id == model_id).order_by(tenant_journal.c.seq_id)
    return [(row.seq_id, row.kind, row.size) for row in connection.execute(of_it)]


def find_model(connection: Connection, model_id: str) -> ModelRow | None:
    if not _is_id(model_id):
        return None
    row = connection.execute(select(tenant_models).where(tenant_models.c.model_id == model_id)).mappings().first()
    return None if row is None else ModelRow(**row)


def read_models(connection: Connection, tenant_id: str) -> list[ModelRow]:
    """Return a tenant's models, newest first."""
    of_it = select(tenant_models).where(tenant_models.c.tenant_id == tenant_id)
    rows = connection.execute(of_it.order_by(tenant_models.c.made_at.desc()))
    return [ModelRow(**row) for row in rows.mappings()]


def find_checkpoint(connection: Connection, path: str) -> CheckpointRow | None:
    if not _is_id(path):
        return None
    row = connection.execute(select(tenant_checkpoints).where(tenant_checkpoints.c.path == path)).mappings().first()
    return None if row is None else CheckpointRow(**row)


def read_checkpoints(connection: Connection, tenant_id: str, model_id: str | None) -> list[CheckpointRow]:
    """Return a tenant's checkpoints, or those of one model, newest first."""
    if model_id is not None and not _is_id(model_id):
        return []
    of_it = select(tenant_checkpoints).where(tenant_checkpoints.c.tenant_id == tenant_id)
    if model_id is not None:
        of_it = of_it.where(tenant_checkpoints.c.model_id == model_id)
    rows = connection.execute(of_it.order_by(tenant_checkpoints.c.made_at.desc()))
    return [CheckpointRow(**row) for row in rows.mappings()]


def read_checkpoint_directories(connection: Connection) -> set[str]:
    """Return the directories of all saved weights, relative to the run's."""
    return set(connection.scalars(select(tenant_checkpoints.c.directory)))


def read_checkpoint_bytes(connection: Connection, tenant_id: str) -> int:
    of_it = select(func.sum(tenant_checkpoints.c.size_bytes)).where(tenant_checkpoints.c.tenant_id == tenant_id)
    return int(connection.scalar(of_it) or 0)


def read_expired_checkpoints(connection: Connection, now: float) -> list[CheckpointRow]:
    expired = (tenant_checkpoints.c.expires_at.is_not(None), tenant_checkpoints.c.expires_at <= now)
    rows = connection.execute(select(tenant_checkpoints).where(*expired))
    return [CheckpointRow(**row) for row in rows.mappings()]


def read_saved_versions(connection: Connection, versions: Sequence[int]) -> dict[int, str]:
    """Return the path under which each of these versions was saved. Versions that were not saved are left out."""
    of_them = (
        among(connection, tenant_versions.c.policy_version, versions),
        tenant_checkpoints.c.model_id == tenant_versions.c.model_id,
        tenant_checkpoints.c.policy_version == tenant_versions.c.policy_version,
    )
    query = select(tenant_checkpoints.c.policy_version, tenant_checkpoints.c.path).where(*of_them)
    return {row.policy_version: row.path for row in connection.execute(query)}


def read_live_versions(connection: Connection) -> list[VersionRow]:
    """Return the versions that are not withdrawn, oldest first."""
    live = select(tenant_versions).where(tenant_versions.c.withdrawn_at.is_(None))
    rows = connection.execute(live.order_by(tenant_versions.c.policy_version))
    return [VersionRow(**row) for row in rows.mappings()]


def read_newest_tenant_version(connection: Connection) -> int:
    """Return the largest number of any tenant's version so far; 0 if there was none."""
    return connection.scalar(select(func.max(tenant_versions.c.policy_version))) or 0


def read_tokens_of_day(connection: Connection, day: int) -> dict[str, int]:
    """Return the tokens that each tenant has used on a day (days since the epoch, UTC)."""
    tallies = tenant_tallies.c
    tokens = tallies.prompt_tokens + tallies.drawn_tokens + tallies.trained_tokens
    query = select(tallies.tenant_id, tokens.label("tokens")).where(tallies.day == day)
    return {row.tenant_id: row.tokens for row in connection.execute(query)}


def read_result_bytes(connection: Connection, *, after: float) -> tuple[dict[str, int], float | None]:
    """Return the bytes of stored outcomes by tenant, for at most `COUNTED_AT_ONCE` outcomes that ended after the time
    `after`, oldest first; and the time after which the next call continues, None at the end. One call takes some
    hundredths of a second, so that other reads wait no longer.
    """
    requests = tenant_requests.c
    query = select(requests.tenant_id, func.length(requests.outcome).label("size"), requests.ended_at)
    kept = query.where(requests.outcome.is_not(None), requests.ended_at > after)
    rows = connection.execute(kept.order_by(requests.ended_at).limit(COUNTED_AT_ONCE)).all()
    found = Counter[str]()
    for row in rows:
        found[row.tenant_id] += row.size
    return dict(found), rows[-1].ended_at if len(rows) == COUNTED_AT_ONCE else None


def drop_tenant_outcomes(connection: Connection, *, read_before: float, ended_before: float) -> int:
    """Delete outcomes that clients read before `read_before`, or that ended before `ended_before`. Return their
    number.
    """
    kept = tenant_requests.c.outcome.is_not(None)
    old = (tenant_requests.c.read_at < read_before) | (tenant_requests.c.ended_at < ended_before)
    # Every row that `old` finds fulfils this too, because a request ends before its outcome is read. The search can use
    # the index by `ended_at` for it.
    ended = tenant_requests.c.ended_at < max(read_before, ended_before)
    return connection.execute(update(tenant_requests).where(kept, ended, old).values(outcome=None)).rowcount


def forget_tenant_sessions(connection: Connection, ended_before: float) -> int:
    """Delete sessions that ended before this time, with their requests and samplers. Models with checkpoints stay.
    Return the number of deleted sessions, at most `AT_ONCE`.
    """
    old = select(tenant_sessions.c.session_id).where(tenant_sessions.c.ended_at < ended_before)
    session_ids = connection.scalars(old.order_by(tenant_sessions.c.ended_at).limit(AT_ONCE)).all()
    of_them = select(tenant_models.c.model_id).where(tenant_models.c.session_id.in_(session_ids))
    connection.execute(delete(tenant_journal).where(tenant_journal.c.model_id.in_(of_them)))
    for table in (tenant_requests, tenant_samplers, tenant_sessions):
        connection.execute(delete(table).where(table.c.session_id.in_(session_ids)))
    saved = exists().where(tenant_checkpoints.c.model_id == tenant_models.c.model_id)
    connection.execute(delete(tenant_models).where(tenant_models.c.session_id.in_(session_ids), ~saved))
    return len(session_ids)
