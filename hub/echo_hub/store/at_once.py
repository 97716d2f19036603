"""Read many rows from SQLite as one JSON value.

SQLite's driver releases and retakes Python's GIL for each row. In a busy hub each retake waits for other threads:
20,000 rows then take seconds. PostgreSQL's driver receives all rows at once and needs no workaround.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import Connection, Row, Select, func, select
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import result_tuple

_KEPT: Final = 128


def rows_at_once(
    connection: Connection, query: Select[Any], parameters: Mapping[str, Any] | None = None
) -> Sequence[Row[Any]]:
    """Return the query's rows, in its order.

    Floats keep 15 digits, so times are exact to ten microseconds. Columns of bytes are not supported. Pass the same
    query object with new `parameters` each time: its compiled form is cached.
    """
    if connection.dialect.name != "sqlite":
        return connection.execute(query, parameters).all()
    at_once = _at_once(query)
    found: list[list[Any]] = json.loads(connection.scalar(at_once.query, parameters) or "[]")
    for place, decode in at_once.decoders.items():
        for row in found:
            row[place] = decode(row[place])
    return [at_once.row_of(row) for row in found]


@dataclass(frozen=True, slots=True)
class _AtOnce:
    """A query that returns all rows as one JSON text. `decoders`, keyed by column position, convert values of types
    that JSON lacks.
    """

    query: Select[tuple[str | None]]
    decoders: Mapping[int, Callable[[Any], Any]]
    row_of: Callable[[Sequence[Any]], Row[Any]]


@lru_cache(_KEPT)
def _at_once(query: Select[Any]) -> _AtOnce:
    dialect = sqlite.dialect()
    columns = list(query.subquery().c)
    decoders = {
        place: column.type.dialect_impl(dialect).result_processor(dialect, None) for place, column in enumerate(columns)
    }
    return _AtOnce(
        select(func.json_group_array(func.json_array(*columns))),
        {place: decode for place, decode in decoders.items() if decode is not None},
        result_tuple([column.name for column in columns]),
    )
