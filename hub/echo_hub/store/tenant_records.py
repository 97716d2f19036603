"""Write what happens to tenants: rows that are added, and records that change rows. A batch is one transaction.

The fields of a row are the columns of its table (`echo_hub.store.tenant_tables`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Final, assert_never

from sqlalchemy import Connection, Table, bindparam, delete, insert, select, update

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

WAITING: Final = "waiting"
DONE: Final = "done"
FAILED: Final = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    session_id: str
    tenant_id: str
    about: Mapping[str, object]
    made_at: float
    ended_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    model_id: str
    tenant_id: str
    session_id: str
    base_model: str
    lora: Mapping[str, Any]
    user_metadata: Mapping[str, str]
    made_at: float
    last_request_at: float
    steps: int = 0
    next_seq: int = 0
    """Lowest seq_id whose request is not finished."""
    covered_seq: int = -1
    """Largest seq_id such that the model's own checkpoint contains the effects of this request and of all earlier ones;
    -1 without a checkpoint."""
    directory: str = ""
    """Directory of the model's own checkpoint, relative to the run's directory; empty = the model begins with
    `lora`.
    """
    ended_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRow:
    sampler_id: str
    tenant_id: str
    session_id: str
    base_model: str
    path: str
    model_id: str
    """Id of the model whose weights draw the samples; empty = the base model draws them."""
    policy_version: int
    inflight: bool
    """True for a sampler that draws each new request with the newest version of its model, among the versions of the
    model's inflight samplers."""
    made_at: float
    ended_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    request_id: str
    tenant_id: str
    session_id: str
    owner_id: str
    """Id of the model or sampler to which the request belongs."""
    seq_id: int
    kind: str
    made_at: float
    state: str = WAITING
    body: bytes | None = None
    """Body of a sample request; None for a training request, whose body is in `tenant_journal`."""
    outcome: bytes | None = None
    ended_at: float | None = None
    end_number: int | None = None
    """Number of the request's end: requests are numbered in the order in which their ends are committed."""
    read_at: float | None = None
    """Time at which the client first read the outcome; None before that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRow:
    model_id: str
    seq_id: int
    kind: str
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    path: str
    tenant_id: str
    model_id: str
    kind: str
    made_at: float
    size_bytes: int
    directory: str
    """Directory of the saved weights, relative to the run's directory."""
    policy_version: int = 0
    steps: int = 0
    expires_at: float | None = None
    recipients: Sequence[str] = ()
    user_metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRow:
    policy_version: int
    tenant_id: str
    model_id: str
    step: int
    request_id: str
    """Id of the request that made the version."""
    made_at: float
    withdrawn_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnded:
    request_id: str
    state: str
    outcome: bytes | None
    ended_at: float
    end_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRead:
    request_id: str
    read_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalReplaced:
    """A request in a model's journal changes its kind and loses its body. A missing row is added."""

    model_id: str
    seq_id: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalDropped:
    model_id: str
    seq_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMoved:
    model_id: str
    next_seq: int
    steps: int
    last_request_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCovered:
    """A checkpoint of the model is on disk. The journal up to `covered_seq` is deleted."""

    model_id: str
    covered_seq: int
    directory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSessionEnded:
    """A session ends, with its models and samplers. Its unfinished requests fail."""

    session_id: str
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSamplerEnded:
    sampler_id: str
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRemoved:
    """The weights in this directory are no longer under their path. If others are there by now, these stay. After the
    commit, the caller deletes the files: the directory, or the version."""

    path: str
    directory: str
    policy_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointKept:
    """A checkpoint gets another expiry time; None = the checkpoint never expires."""

    path: str
    expires_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionWithdrawn:
    policy_version: int
    withdrawn_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantTallied:
    """Numbers to add to a tenant's totals of a day (days since the epoch, UTC)."""

    tenant_id: str
    day: int
    requests: int = 0
    prompt_tokens: int = 0
    drawn_tokens: int = 0
    trained_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.drawn_tokens + self.trained_tokens


TenantRow = SessionRow | ModelRow | SamplerRow | RequestRow | JournalRow | CheckpointRow | VersionRow
TenantChange = (
    RequestEnded
    | RequestRead
    | JournalReplaced
    | JournalDropped
    | ModelMoved
    | ModelCovered
    | TenantSessionEnded
    | TenantSamplerEnded
    | CheckpointRemoved
    | CheckpointKept
    | VersionWithdrawn
    | TenantTallied
)
TenantRecord = TenantRow | TenantChange

_TABLES: Final[Mapping[type, Table]] = {
    SessionRow: tenant_sessions,
    ModelRow: tenant_models,
    SamplerRow: tenant_samplers,
    RequestRow: tenant_requests,
    JournalRow: tenant_journal,
    CheckpointRow: tenant_checkpoints,
    VersionRow: tenant_versions,
}
_ENDED: Final = (
    update(tenant_requests)
    .where(tenant_requests.c.request_id == bindparam("key"))
    .values(
        state=bindparam("state"),
        outcome=bindparam("outcome"),
        ended_at=bindparam("ended_at"),
        end_number=bindparam("end_number"),
        body=None,
    )
)


def write_tenant_records(connection: Connection, records: Sequence[TenantRecord]) -> None:
    """Write the records in their order."""
    for kind, of_kind in groupby(records, key=type):
        table = _TABLES.get(kind)
        if table is not None:
            connection.execute(insert(table), [asdict(row) for row in of_kind])
            continue
        for record in of_kind:
            _change(connection, record)  # type: ignore[arg-type]  # Not a row: these are all in the table.


def _change(connection: Connection, record: TenantChange) -> None:
    match record:
        case RequestEnded():
            given = asdict(record)
            connection.execute(_ENDED, {"key": given.pop("request_id"), **given})
        case RequestRead():
            unread = (tenant_requests.c.request_id == record.request_id, tenant_requests.c.read_at.is_(None))
            connection.execute(update(tenant_requests).where(*unread).values(read_at=record.read_at))
        case JournalReplaced() | JournalDropped():
            _change_journal(connection, record)
        case ModelMoved() | ModelCovered():
            _change_model(connection, record)
        case TenantSessionEnded():
            _end_session(connection, record)
        case TenantSamplerEnded():
            of_it = update(tenant_samplers).where(tenant_samplers.c.sampler_id == record.sampler_id)
            connection.execute(of_it.values(ended_at=record.ended_at))
        case CheckpointRemoved():
            columns = tenant_checkpoints.c
            there = (columns.path == record.path, columns.directory == record.directory)
            connection.execute(delete(tenant_checkpoints).where(*there))
        case CheckpointKept():
            kept = update(tenant_checkpoints).where(tenant_checkpoints.c.path == record.path)
            connection.execute(kept.values(expires_at=record.expires_at))
        case VersionWithdrawn():
            of_it = update(tenant_versions).where(tenant_versions.c.policy_version == record.policy_version)
            connection.execute(of_it.values(withdrawn_at=record.withdrawn_at))
        case TenantTallied():
            _tally(connection, record)
        case _:
            assert_never(record)


def _change_journal(connection: Connection, record: JournalReplaced | JournalDropped) -> None:
    row = (tenant_journal.c.model_id == record.model_id, tenant_journal.c.seq_id == record.seq_id)
    connection.execute(delete(tenant_journal).where(*row))
    if isinstance(record, JournalReplaced):
        connection.execute(insert(tenant_journal), {**asdict(record), "body": b""})


def _change_model(connection: Connection, record: ModelMoved | ModelCovered) -> None:
    given = asdict(record)
    connection.execute(update(tenant_models).where(tenant_models.c.model_id == given.pop("model_id")).values(given))
    if isinstance(record, ModelCovered):
        covered = (tenant_journal.c.model_id == record.model_id, tenant_journal.c.seq_id <= record.covered_seq)
        connection.execute(delete(tenant_journal).where(*covered))


def _end_session(connection: Connection, record: TenantSessionEnded) -> None:
    for table in (tenant_sessions, tenant_models, tenant_samplers):
        live = (table.c.session_id == record.session_id, table.c.ended_at.is_(None))
        connection.execute(update(table).where(*live).values(ended_at=record.ended_at))
    waiting = (tenant_requests.c.session_id == record.session_id, tenant_requests.c.state == WAITING)
    ended = {"state": FAILED, "ended_at": record.ended_at, "body": None}
    connection.execute(update(tenant_requests).where(*waiting).values(ended))
    of_session = select(tenant_models.c.model_id).where(tenant_models.c.session_id == record.session_id)
    for model_id in connection.scalars(of_session).all():
        connection.execute(delete(tenant_journal).where(tenant_journal.c.model_id == model_id))


def _tally(connection: Connection, record: TenantTallied) -> None:
    given = asdict(record)
    key = (tenant_tallies.c.tenant_id == given.pop("tenant_id"), tenant_tallies.c.day == given.pop("day"))
    added = {name: tenant_tallies.c[name] + number for name, number in given.items()}
    if connection.execute(update(tenant_tallies).where(*key).values(added)).rowcount == 0:
        connection.execute(insert(tenant_tallies), asdict(record))
