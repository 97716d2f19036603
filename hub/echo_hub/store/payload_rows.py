"""Columns that hold a rollout's tokens, in the tables `payloads` and `kept`; conversion between rows and payloads.

Columns and conversion are derived from the fields of `RolloutPayload`. If a field has no default, its column is never
NULL. In the other columns, NULL stands for the field's default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from operator import attrgetter
from typing import Any, Final, get_type_hints

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import JSON, BigInteger, Column, Double, LargeBinary, String, Text
from sqlalchemy.types import TypeEngine

from echo_shared.records.rollout import DrawnSpan, RolloutPayload, pack_spans, unpack_spans
from echo_shared.wire.messages import FinishReason
from echo_shared.wire.messages.fields import PackedArray


def ids_of(stored: bytes | None) -> NDArray[np.int32]:
    """Return the token ids in a column; an empty array for NULL."""
    return np.frombuffer(stored or b"", "<i4")


def bytes_of(ids: NDArray[np.int32]) -> bytes:
    """Return token ids as bytes, the form in which a column holds them."""
    return np.ascontiguousarray(ids, "<i4").tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """How one field of `RolloutPayload` is stored in a column."""

    name: str
    type: TypeEngine[Any]
    write: Callable[[RolloutPayload], Any]
    read: Callable[[Any], Any]
    """Returns the field's value, given a column value that is not NULL."""
    is_nullable: bool


def _stored(name: str, hint: Any, *, is_nullable: bool) -> _Stored:
    get: Callable[[RolloutPayload], Any] = attrgetter(name)
    kind, packed = getattr(hint, "__origin__", hint), PackedArray.of(hint)
    if packed is not None:
        dtype = packed.dtype
        return _Stored(
            name=name,
            type=LargeBinary(),
            write=lambda payload: np.ascontiguousarray(get(payload), dtype).tobytes(),
            read=lambda stored: np.frombuffer(stored, dtype),
            is_nullable=is_nullable,
        )
    if hint == tuple[DrawnSpan, ...]:
        return _Stored(
            name=name,
            type=JSON(none_as_null=True),
            write=lambda payload: pack_spans(payload.spans) if payload.spans else None,
            read=unpack_spans,
            is_nullable=is_nullable,
        )
    if kind is FinishReason:
        return _Stored(name=name, type=String(16), write=get, read=FinishReason, is_nullable=is_nullable)
    if kind is bytes and is_nullable:
        return _Stored(
            name=name, type=_SCALARS[kind], write=lambda payload: get(payload) or None, read=bytes, is_nullable=True
        )
    return _Stored(name=name, type=_SCALARS[kind], write=get, read=kind, is_nullable=is_nullable)


_SCALARS: Final[dict[type, TypeEngine[Any]]] = {
    float: Double(),
    int: BigInteger(),
    str: Text(),
    bytes: LargeBinary(),
}
_HINTS: Final = get_type_hints(RolloutPayload, include_extras=True)
_STORED: Final = tuple(
    _stored(field.name, _HINTS[field.name], is_nullable=(field.default, field.default_factory) != (MISSING, MISSING))
    for field in fields(RolloutPayload)
)
NAMES: Final = tuple(each.name for each in _STORED)
_WRITERS: Final = tuple((each.name, each.write) for each in _STORED if each.name != "observation_ids")
_READERS: Final = tuple((each.name, attrgetter(each.name), each.read) for each in _STORED)


def columns() -> list[Column[Any]]:
    """Return new SQLAlchemy columns for one table; a column object can belong to one table only."""
    return [Column(each.name, each.type, nullable=each.is_nullable) for each in _STORED]


def row_of(payload: RolloutPayload) -> dict[str, Any]:
    """Return the column values of a received payload. The column for the environment's answer to the turn is left out,
    because the answer comes later.
    """
    return {name: write(payload) for name, write in _WRITERS}


def payload_of(row: Any, *, is_attributed: bool = False) -> RolloutPayload:
    """Return the payload in a row that has all columns of `NAMES`.

    With `is_attributed`, the row also has its lease's `node_id` and `policy_version`. If the row does not store which
    node and version drew which tokens, all tokens are attributed to these.
    """
    values = {name: read(stored) for name, get, read in _READERS if (stored := get(row)) is not None}
    if is_attributed and "spans" not in values:
        values["spans"] = (
            DrawnSpan(node_id=row.node_id, policy_version=row.policy_version, num_tokens=len(values["completion_ids"])),
        )
    return RolloutPayload(**values)
